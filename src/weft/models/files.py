"""The safetensors files of a checkpoint, and the tensors in them."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.core.config import ModelArgs
from weft.core.errors import ConfigError
from weft.models.config import resolve_model

_SAMPLED_BYTES, _SAMPLED_TENSORS = 64, 64
_RENAMED = (
    # OLMo Hybrid
    (".attention_layer_norm.", ".input_layernorm."),
    (".feedforward_layer_norm.", ".post_attention_layernorm."),
    # Sarvam MoE
    ("model.word_embeddings.", "model.embed_tokens."),
    (".attention.query_key_value.", ".self_attn.query_key_value."),
    (".attention.query_layernorm.", ".self_attn.q_norm."),
    (".attention.key_layernorm.", ".self_attn.k_norm."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)
"""Parts of names in files of some families, and what transformers calls them."""
_CONVOLUTIONS = tuple(f".{part}_conv1d.weight" for part in "qkv")


@dataclass(frozen=True, slots=True)
class _JoinedTensors:
    """Tensors of a file one behind the other, read like one of its tensors."""

    parts: tuple[Any, ...]

    def get_shape(self) -> list[int]:
        """The shape of the whole. Its first size is -1 unless the tensors have all other sizes in
        common."""
        shapes = [list(part.get_shape()) for part in self.parts]
        fit = all(shape[1:] == shapes[0][1:] for shape in shapes)
        return [sum(shape[0] for shape in shapes) if fit else -1, *shapes[0][1:]]

    def get_dtype(self) -> str:
        found: str = self.parts[0].get_dtype()
        return found

    def __getitem__(self, index: Any) -> Tensor:
        return torch.cat([part[:] for part in self.parts])[index]


def stored_tensors(folder: Path, device: torch.device | str) -> dict[str, Any]:
    """The tensors of all files by name, which are read lazily. Of equal names, the last counts.
    Names are those of transformers where families have others, and the parts of OLMo Hybrid's
    convolutions are one tensor. Raises ConfigError for files that can't be read."""
    found = dict(_each(folder, device))
    for name in list(found):
        own = name
        for stored, ours in _RENAMED:
            own = own.replace(stored, ours)
        if own != name:
            found[own] = found.pop(name)
        parts = tuple(name.replace(_CONVOLUTIONS[0], end) for end in _CONVOLUTIONS)
        if name.endswith(_CONVOLUTIONS[0]) and found.keys() >= set(parts):
            whole = name.replace(_CONVOLUTIONS[0], ".conv1d.weight")
            found[whole] = _JoinedTensors(tuple(found.pop(part) for part in parts))
    return found


def _each(folder: Path, device: torch.device | str) -> Iterator[tuple[str, Any]]:
    """(name, lazily read tensor) over all files."""
    from safetensors import SafetensorError, safe_open

    for path in _files(folder):
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_slice(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"can't read {path}: {error}", "model") from error


def sample_hash(args: ModelArgs) -> str:
    """A hash of the first bytes of some tensors of each kind, which tells checkpoints of one shape
    apart. It is the same however tensors are divided among files, and "" for random weights. The
    checkpoint must be one that can be loaded."""
    if args.load_format == "dummy":
        return ""
    places: dict[str, tuple[Path, int, int]] = {}
    for path in _files(resolve_model(args.model, args.revision)):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, stored in header.items():
            begin, end = (8 + length + offset for offset in stored["data_offsets"])
            places[name] = path, begin, min(end - begin, _SAMPLED_BYTES)
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in sorted(places):
        kinds[re.sub("[0-9]+", "", name)].append(name)
    sample = hashlib.sha256()
    for names in kinds.values():
        for name in names[:: -(-len(names) // _SAMPLED_TENSORS)]:
            path, begin, length = places[name]
            with path.open("rb", buffering=0) as file:
                file.seek(begin)
                sample.update(f"{name} {file.read(length).hex()} ".encode())
    return sample.hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    """The single safetensors file, or those that the index names. If a folder has both, the index
    is that of an older model, which transformers leaves there and doesn't read either."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            stated = json.loads(index.read_text(encoding="utf-8"))
            names = sorted(set(stated["weight_map"].values()))
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(f"{index} is not a safetensors index: {error}", "model") from error
        return [_shard(folder, name) for name in names]
    pickled = [p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth")]
    if pickled:
        raise ConfigError(f"{folder} holds {pickled[0]}: only safetensors are read", "model")
    raise ConfigError(f"{folder} holds no model.safetensors", "model")


def _shard(folder: Path, name: object) -> Path:
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise ConfigError(f"the index of {folder} names {name!r}, not a safetensors file", "model")
    path = folder / name
    try:
        is_there = path.is_file()
    except OSError as error:  # such as a name too long
        raise ConfigError(f"can't read {path}: {error}", "model") from error
    if not is_there:
        raise ConfigError(f"{path} is missing", "model")
    return path
