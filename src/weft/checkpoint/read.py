"""The two files of an adapter: their bytes, their digest, their tensors.

Each file is read once, and everything else is derived from those bytes, so that the digest is
that of the content served even when somebody writes to the folder meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, deserialize

from weft.checkpoint.config import CONFIG_FILE
from weft.checkpoint.refuse import refuse, show, shown_name
from weft.core.errors import AdapterNotFound

WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What weights may be stored in, by safetensors' names."""

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True)
class AdapterFiles:
    """The content of an adapter's folder."""

    config: bytes
    weights: bytes

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) over, for config and weights in this order: the length as 8 bytes, little
        endian, then the bytes of the file."""
        sha = hashlib.sha256()
        for content in (self.config, self.weights):
            sha.update(len(content).to_bytes(8, "little"))
            sha.update(content)
        return sha.hexdigest()


def read_files(folder: Path, max_weight_bytes: int) -> AdapterFiles:
    """Raises AdapterNotFound (no folder, a file missing) and AdapterInvalid (pickle, too large)."""
    if not _is(folder, directory=True):
        raise AdapterNotFound(f"{show(str(folder))} is not a folder", "lora_path")
    config = _read(folder, CONFIG_FILE, MAX_CONFIG_BYTES)
    if not _is(folder / WEIGHTS_FILE, directory=False):
        _refuse_pickle(folder)
    return AdapterFiles(config, _read(folder, WEIGHTS_FILE, max_weight_bytes))


def parse_tensors(weights: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name, CPU, in the file's dtypes.

    Raises AdapterInvalid for a malformed file or a dtype other than float32, float16, bfloat16.
    """
    _check_header(weights)
    try:
        found = deserialize(weights)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError, OverflowError) as error:
        refuse(WEIGHTS_FILE, f"malformed: {shown_name(str(error))}")
    return {name: _tensor(name, spec) for name, spec in found}


def _is(path: Path, directory: bool) -> bool:
    try:
        return path.is_dir() if directory else path.is_file()
    except (OSError, ValueError):
        return False


def _read(folder: Path, name: str, max_bytes: int) -> bytes:
    path = folder / name
    if not _is(path, directory=False):
        raise AdapterNotFound(f"{show(str(folder))} has no file {name}", name)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        message = f"{show(str(path))} can't be read: {error.strerror}"
        raise AdapterNotFound(message, name) from None
    if len(content) > max_bytes:
        refuse(name, f"larger than any that is served here ({max_bytes} bytes)")
    return content


def _refuse_pickle(folder: Path) -> None:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _PICKLES)
    except OSError:
        names = []
    if names:
        refuse(
            names[0],
            "pickle files are never opened here; save the adapter as"
            f" {WEIGHTS_FILE} (safe_serialization=True)",
        )


def _check_header(weights: bytes) -> None:
    """The header must lie inside the file and name no tensor twice."""
    length = int.from_bytes(weights[:8], "little")
    if len(weights) < 8 or length > len(weights) - 8:
        refuse(WEIGHTS_FILE, "malformed: it ends before its header does")
    if length > MAX_HEADER_BYTES:
        refuse(WEIGHTS_FILE, f"malformed: its header has {length} bytes")
    try:
        json.loads(weights[8 : 8 + length], object_pairs_hook=_distinct)
    except RecursionError:
        refuse(WEIGHTS_FILE, "malformed: its header is nested too deeply")
    except ValueError as error:
        refuse(WEIGHTS_FILE, f"malformed: its header is not JSON ({shown_name(str(error))})")


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _tensor(name: str, spec: dict[str, object]) -> torch.Tensor:
    dtype = DTYPES.get(str(spec["dtype"]))
    if dtype is None:
        refuse(name, f"has the dtype {spec['dtype']}; only {', '.join(DTYPES)} are served")
    shape, data = spec["shape"], spec["data"]
    assert isinstance(shape, list) and isinstance(data, bytearray)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
