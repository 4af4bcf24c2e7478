"""An engine to measure: a base of known shape, and adapters with random weights."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch
from safetensors.torch import save_file

from weft.bench.presets import PRESETS
from weft.bench.report import progress
from weft.checkpoint.pack import AdapterImage
from weft.core.adapters import AdapterInfo
from weft.core.errors import ConfigError
from weft.core.files import CONFIG_FILE, WEIGHTS_FILE
from weft.core.stats import EngineInfo
from weft.core.targets import ALIGN, ImageLayout, Target, TargetTable, layout_of
from weft.engine.engine import Engine
from weft.llm import LLM
from weft.models.blueprint import model_shard
from weft.models.config import load_model_config

ADAPTER_STD = 0.01
"""The standard deviation of A and B, with which outputs stay finite at any depth."""


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What all adapters of a run have in common."""

    rank: int
    targets: tuple[str, ...] | None = None
    """Names of projections such as ("q_proj", "v_proj"), or of a mixture's experts such as
    "experts.down_proj". None means all linear layers, without experts."""

    def of(self, table: TargetTable) -> list[Target]:
        """The projections to adapt. Raises ConfigError for a name that the model lacks."""
        linear = [t for t in table.targets if t.kind == "linear"]
        if self.targets is None:
            return linear
        named = [(t.suffix, t) for t in linear]
        named += [("experts." + t.suffix, t) for t in table.targets if t.kind == "experts"]
        known = dict.fromkeys(name for name, _ in named)
        for name in self.targets:
            if name not in known:
                wanted = ", ".join(known)
                raise ConfigError(f"--targets: {name!r} is none of {wanted}", "targets")
        return [target for name, target in named if name in self.targets]


def default_model(options: Mapping[str, object]) -> str:
    """A model that the device can be expected to run."""
    return "llama-3-8b" if on_gpu(options) else "tiny"


@contextmanager
def open_engine(
    model: str,
    shape: AdapterShape,
    num_adapters: int,
    options: Mapping[str, object],
) -> Iterator[LLM]:
    """An LLM over a preset, a folder or a hub id, with adapters published as `adapter_name`.

    The memory for adapters holds all of them, unless `options` say otherwise. Raises ConfigError.
    """
    with preset_folder(model) as folder:
        adapters = RandomAdapters(folder, shape, options)
        needed = max(num_adapters, 1) * adapters.num_bytes(shape.rank)
        sized = {name: value for name, value in options.items() if value is not None}
        sized.setdefault("adapter_memory", needed)
        llm = _BenchLLM(folder, None, skip_tokenizer_init=True, **sized)
        with llm:
            with progress("Adapters", num_adapters) as advance:
                images = adapters.images([shape.rank] * num_adapters, llm.engine)
                for index, image in enumerate(images):
                    llm.publish_image(adapter_name(index), image)
                    advance()
            yield llm


class _BenchLLM(LLM):
    """An LLM that takes adapters as they are packed."""

    @property
    def engine(self) -> Engine:
        return self._client.engine

    def publish_image(self, name: str, image: AdapterImage) -> None:
        async def hold() -> AdapterInfo:
            return self.engine.hold_image(image, name)

        self._executor.run(self._publisher.publish(name, "noise", hold))


def adapter_name(index: int) -> str:
    return f"adapter-{index}"


def describe(info: EngineInfo, shape: AdapterShape) -> dict[str, object]:
    """What was measured, as fields of a report."""
    return {
        "architecture": info.architecture,
        "parameters": info.num_parameters,
        "dtype": info.dtype,
        "rank": shape.rank,
        "targets": list(shape.targets) if shape.targets else "all linear",
        "adapter_memory_bytes": info.adapter_memory_bytes,
    }


def subject(model: str, info: EngineInfo, shape: AdapterShape) -> str:
    """What was measured in a few words, for a title."""
    return f"{model}, {info.dtype}, rank {shape.rank}, {device_name(info)}"


def device_name(info: EngineInfo) -> str:
    on_gpu = info.device.startswith("cuda")
    return torch.cuda.get_device_name(info.device) if on_gpu else "CPU"


def on_gpu(options: Mapping[str, object]) -> bool:
    """Whether an engine with these options would run there."""
    return options.get("device") != "cpu" and torch.cuda.is_available()


@contextmanager
def preset_folder(model: str) -> Iterator[str]:
    """The folder or hub id of a model. A preset's configuration is written to a folder that exists
    as long as the context does. Raises ConfigError for what must be a misspelt preset."""
    if model not in PRESETS:
        if "/" not in model and not Path(model).exists():
            for like in get_close_matches(model, PRESETS, 1):
                message = f"there is no folder or shape {model}; did you mean {like}?"
                raise ConfigError(message, "model")
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(PRESETS[model]), encoding="utf-8")
        yield folder


def _item_bytes(dtype: object, on_gpu: bool) -> int:
    """The bytes of one element of an adapter. The dtype `auto` is never float32 on a GPU, and
    always on a CPU."""
    wide = dtype == "float32" or (dtype in (None, "auto") and not on_gpu)
    return 4 if wide else 2


class RandomAdapters:
    """Makes adapters with random weights for the model of an engine that has these options."""

    def __init__(self, folder: str, shape: AdapterShape, options: Mapping[str, object]) -> None:
        """Raises ConfigError for a projection that the model lacks."""
        revision, num_ranks = options.get("revision"), options.get("tensor_parallel_size")
        self._shard = model_shard(
            load_model_config(folder, revision if isinstance(revision, str) else None),
            0,
            num_ranks if isinstance(num_ranks, int) else 1,
            fully_sharded_loras=bool(options.get("fully_sharded_loras")),
        )
        self.num_parts = self._shard.size
        """How many GPUs share each adapter."""
        self._targets = shape.of(self._shard.whole)
        self._item_bytes = _item_bytes(options.get("dtype"), on_gpu(options))

    def num_bytes(self, rank: int) -> int:
        """The bytes that one adapter takes on a device."""
        return self._layout(rank).num_elements * self._item_bytes

    def images(self, ranks: Sequence[int], engine: Engine) -> Iterator[AdapterImage]:
        """One adapter of each of `ranks`, all of them different.

        They are windows of one buffer in the host's memory, each begun a little later, so that
        thousands of them take the memory of one, and take no time to make. A digest stands for
        where the window is.
        """
        if not ranks:
            return
        layouts = {rank: self._layout(rank) for rank in set(ranks)}
        largest = max(layouts.values(), key=lambda layout: layout.num_elements)
        size = self.num_parts * largest.num_elements + ALIGN * len(ranks)
        noise = _noise(size, engine.info.dtype)
        names = tuple(dict.fromkeys(t.suffix for t in self._targets))
        noise = engine.stay_on_host(AdapterImage("noise", largest, noise, names)).data
        for index, rank in enumerate(ranks):
            window = noise[index * ALIGN :][: self.num_parts * layouts[rank].num_elements]
            digest = hashlib.sha256(f"noise {index} {rank}".encode()).hexdigest()
            yield AdapterImage(digest, layouts[rank], window, names)

    def write(self, folder: Path, ranks: Sequence[int], dtype: str) -> Iterator[Path]:
        """Write one folder per rank with a random adapter, as PEFT writes them. All of them
        differ: each is a window of one buffer of noise, begun one element later. To draw as many
        normal numbers for each would take longer than the measurement. Raises ConfigError for
        adapters of experts."""
        if any(target.kind == "experts" for target in self._targets):
            message = "--targets: adapters of experts are not written to folders"
            raise ConfigError(message, "targets")
        num_columns = sum(t.in_features + t.out_features for t in self._targets)
        noise = _noise(max(ranks, default=0) * num_columns + len(ranks), dtype)
        names = sorted({t.suffix for t in self._targets})
        for index, rank in enumerate(ranks):
            path = folder / adapter_name(index)
            path.mkdir()
            config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
            (path / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
            save_file(_tensors(noise[index:], self._targets, rank), path / WEIGHTS_FILE)
            yield path

    def _layout(self, rank: int) -> ImageLayout:
        adapted = {t.slice for t in self._targets}
        table = self._shard.own
        return layout_of(table, tuple(rank if t.slice in adapted else 0 for t in table.targets))


def _noise(size: int, dtype: str) -> torch.Tensor:
    noise = torch.empty(size, dtype=torch.float32)
    noise = noise.normal_(std=ADAPTER_STD, generator=torch.Generator().manual_seed(0))
    return noise.to(getattr(torch, dtype))


def _tensors(noise: torch.Tensor, targets: Sequence[Target], rank: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    offset = 0
    for target in targets:
        for part, shape in (
            ("lora_A", (rank, target.in_features)),
            ("lora_B", (target.out_features, rank)),
        ):
            end = offset + shape[0] * shape[1]
            name = f"base_model.model.{target.name}.{part}.weight"
            tensors[name] = noise[offset:end].view(shape)
            offset = end
    return tensors
