"""Whatever an adapter's two files hold: they are read, or refused with a typed error that names a
field, tensor or file. Nothing crashes, hangs, or allocates much more than the files' size."""

from __future__ import annotations

import copy
import json
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from other_kinds import CONFIG, KINDS, WEIGHTS, make, make_adapter
from peft import IA3Config, LoraConfig
from safetensors.torch import load_file, save

from weft.checkpoint.examine import Examined, examine
from weft.checkpoint.kinds import find_kind, kind_names
from weft.checkpoint.kinds.base import COMMON_READ
from weft.checkpoint.pack import pack_image
from weft.checkpoint.read import AdapterFiles
from weft.core.errors import AdapterError
from weft.core.targets import TargetTable

MAX_RANK = 16
BOUND = 64 << 20
"""Bytes of address space that the process may gain: what is asked for in one go and never touched
shows here alone."""
FACTOR, SLACK = 10, 64 << 10
"""Of the files' size, and bytes besides, that may be allocated at a time: a header of names alone
takes nine times its size."""

ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": make(LoraConfig, r=2, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "dora": make(
        LoraConfig, r=2, target_modules=["q_proj", "down_proj"], use_dora=True, use_rslora=True
    ),
    "pissa": make(LoraConfig, r=2, target_modules=["q_proj"], init_lora_weights="pissa"),
    "beside": make(
        LoraConfig,
        r=2,
        target_modules=["q_proj"],
        lora_bias=True,
        modules_to_save=["lm_head", "norm"],
        trainable_token_indices=[1, 5],
        rank_pattern={"layers.1": 3},
    ),
    "ia3": make(
        IA3Config, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    **{name: KINDS[name] for name in ("adalora", "vera", "vera, drawn", "loha", "lokr, both")},
    "loha, approximated": KINDS["loha, full"],
    "lokr": KINDS["lokr"],
}


@dataclass(frozen=True, repr=False)
class Saved:
    config: dict[str, Any]
    weights: bytes
    tensors: dict[str, torch.Tensor]


class Adapters(dict[str, Saved]):
    """By name, and the base's table."""

    table: TargetTable

    def __repr__(self) -> str:  # which Hypothesis wants for every example
        return "adapters"


@pytest.fixture(scope="module")
def saved(table: TargetTable, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    made = Adapters()
    made.table = table
    for name, kind in ADAPTERS.items():
        folder = tmp_path_factory.mktemp("adapter")
        make_adapter(folder, kind)
        config = json.loads((folder / CONFIG).read_text())
        weights = (folder / WEIGHTS).read_bytes()
        made[name] = Saved(config, weights, load_file(folder / WEIGHTS))
    return made


@pytest.fixture(scope="module", autouse=True)
def _bounded(saved: Adapters) -> Iterator[None]:
    """No allocation can succeed that is far beyond what the files justify."""
    for each in saved.values():
        read(each.config, each.weights, saved.table)  # what is loaded on first use is loaded now
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BOUND, before[1]))
    tracemalloc.start()
    yield
    tracemalloc.stop()
    resource.setrlimit(resource.RLIMIT_AS, before)


def read(config: dict[str, Any] | bytes, weights: bytes, table: TargetTable) -> bool:
    """Whether the files are an adapter; whatever they are, by the rules."""
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    told = verdict(text, weights, table)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        image = pack_image(AdapterFiles(text, weights), table, torch.float16, MAX_RANK)
    except AdapterError as error:
        assert error.param and error.param.isprintable() and len(error.param) < 200
        assert error.message.startswith(error.param) and len(error.message) < 1500
        error.message.encode()
        assert told in (None, error.message)
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1] - before
        assert peak <= FACTOR * (len(text) + len(weights)) + SLACK
    assert torch.isfinite(image.data).all() or image.layout.has_extras
    size, provisional, error = image.num_bytes, image.provisional, image.conversion_error
    assert told in (
        None,
        Examined(image.digest, image.layout, image.targets, size, provisional, error),
    )
    return True


def verdict(config: bytes, weights: bytes, table: TargetTable) -> Examined | str | None:
    """What is told without torch, if anything: a refusal's message, or what the image would be."""
    try:
        return examine(AdapterFiles(config, weights), table, "float16", MAX_RANK)
    except AdapterError as error:
        return error.message


fuzz = settings(
    max_examples=15,
    deadline=timedelta(seconds=30),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
NAMES = st.sampled_from(sorted(ADAPTERS))
NUMBERS = st.sampled_from(
    [0, -1, 1, 2, 3, 255, 1 << 31, 1 << 47, 1 << 62, 1 << 63, 1 << 64, 10**400, 0.5, 1e38, 1e308]
) | st.floats(allow_nan=True, allow_infinity=True)
TEXTS = st.sampled_from(
    ["", "\ud800", "\0", "é" * 300, "x" * 5000, "q_proj", ".*", "(", "(a+)+$", "all-linear"]
) | st.text(max_size=8)


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS | st.builds(nested, st.sampled_from([3, 200]))
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(TEXTS, SCALARS, max_size=2)
READ = COMMON_READ.union(*(find_kind(name).read for name in kind_names()))
FIELDS = st.sampled_from(sorted(READ))


def test_the_adapters_are_good(saved: Adapters) -> None:
    for name, each in saved.items():
        good = read(each.config, each.weights, saved.table)
        assert good != (name == "loha, approximated"), name


@fuzz
@given(
    name=NAMES,
    changes=st.dictionaries(FIELDS | TEXTS, VALUES, max_size=2),
    own=st.lists(st.tuples(st.integers(0, 99), VALUES), max_size=2),
)
def test_any_config(
    saved: Adapters,
    name: str,
    changes: dict[str, Any],
    own: list[tuple[int, Any]],
) -> None:
    config = saved[name].config | changes
    for index, value in own:
        config[sorted(config)[index % len(config)]] = value
    read(config, saved[name].weights, saved.table)


@fuzz
@given(name=NAMES, other=NAMES, merged=st.booleans())
def test_a_config_beside_the_tensors_of_another_kind(
    saved: Adapters, name: str, other: str, merged: bool
) -> None:
    config = saved[other].config | saved[name].config if merged else saved[name].config
    read(config, saved[other].weights, saved.table)


def shaped(tensor: torch.Tensor, how: str) -> torch.Tensor:
    if how == "transposed":
        return tensor.t().contiguous() if tensor.dim() == 2 else tensor[None]
    if how == "empty":
        return tensor.new_empty((0, *tensor.shape[1:]))
    if how == "scalar":
        return tensor.flatten()[0].clone()
    if how == "deep":
        return tensor.reshape((1,) * 7 + tuple(tensor.shape))
    if how == "halved":
        return tensor[: len(tensor) // 2].clone()
    return tensor.flatten()


SHAPES = st.sampled_from(["transposed", "empty", "scalar", "deep", "halved", "flat"])
DTYPES = st.sampled_from(
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool]
)
EXTREMES = st.sampled_from([0.0, 1e38, -3e38, 65504.0, 1e-40, float("nan"), float("inf")])


def changed(data: st.DataObject, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        kind = data.draw(st.sampled_from(["shape", "dtype", "fill", "all", "drop", "name", "part"]))
        if kind == "shape":
            tensors[name] = shaped(tensors[name], data.draw(SHAPES))
        elif kind == "dtype":
            tensors[name] = tensors[name].to(data.draw(DTYPES))
        elif kind == "fill" and tensors[name].dtype.is_floating_point:
            tensors[name].fill_(data.draw(EXTREMES))
        elif kind == "all":
            value = data.draw(st.sampled_from([0.0, 1e20, 1e38]))
            tensors = {key: torch.full_like(t.float(), value) for key, t in tensors.items()}
        elif kind == "drop" and len(tensors) > 1:
            del tensors[name]
        elif kind == "name":
            tensors[data.draw(st.text(max_size=20))] = tensors[name].clone()
        elif kind == "part":
            module, _, part = name.rpartition(".")
            other = data.draw(st.sampled_from(sorted(tensors))).rpartition(".")
            tensors[f"{module}.{other[2]}"] = tensors[name].clone()
            tensors[f"{other[0]}.{part}"] = tensors[name].clone()
    return tensors


@fuzz
@given(name=NAMES, data=st.data())
def test_any_tensors(saved: Adapters, name: str, data: st.DataObject) -> None:
    read(saved[name].config, save(changed(data, saved[name].tensors)), saved.table)


def unpacked(weights: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(weights[:8], "little")
    return json.loads(weights[8:end]), weights[end:]


def packed(header: Any, content: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def is_whole(entry: Any) -> bool:
    """Whether more of it can be spoilt."""
    if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
        return False
    offsets = entry.get("data_offsets")
    return isinstance(offsets, list) and len(offsets) == 2


def spoil(data: st.DataObject, header: dict[str, Any]) -> Any:
    whole = [name for name, entry in header.items() if is_whole(entry)]
    if not whole:
        return header
    name = data.draw(st.sampled_from(sorted(whole)))
    entry = header[name]
    kind = data.draw(
        st.sampled_from(["value", "shape", "offset", "rename", "drop", "copy", "add", "top"])
    )
    if kind == "value":
        key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
        header[name] = {**entry, key: data.draw(VALUES)}
    elif kind == "shape" and entry["shape"]:
        at = data.draw(st.integers(0, len(entry["shape"]) - 1))
        entry["shape"][at] = data.draw(NUMBERS)
    elif kind == "offset":
        at = data.draw(st.integers(0, 1))
        entry["data_offsets"][at] = data.draw(NUMBERS | st.integers(-64, 1 << 12))
    elif kind == "rename":
        header[data.draw(TEXTS)] = header.pop(name)
    elif kind == "drop":
        del header[name]
    elif kind == "copy":
        header[data.draw(TEXTS)] = copy.deepcopy(entry)
    elif kind == "add":
        header[data.draw(TEXTS | st.just("__metadata__"))] = data.draw(VALUES)
    elif kind == "top":
        return data.draw(VALUES)
    return header


@fuzz
@given(name=NAMES, data=st.data())
def test_any_header(saved: Adapters, name: str, data: st.DataObject) -> None:
    header, content = unpacked(saved[name].weights)
    for _ in range(data.draw(st.integers(1, 3))):
        if isinstance(header, dict) and header:
            header = spoil(data, header)
    read(saved[name].config, packed(header, content), saved.table)


EDITS = st.tuples(
    st.sampled_from(["cut", "flip", "insert", "extend", "zero"]), st.floats(0, 1), st.binary()
)


def edited(content: bytes, edits: list[tuple[str, float, bytes]], span: int) -> bytes:
    for kind, where, some in edits:
        at = int(where * min(span, len(content)))
        if kind == "cut":
            content = content[:at]
        elif kind == "insert":
            content = content[:at] + some + content[at:]
        elif kind == "extend":
            content += some * 100
        elif kind == "zero":
            content = content[:at] + bytes(len(some)) + content[at + len(some) :]
        else:
            flipped = bytes(a ^ b for a, b in zip(content[at:], some, strict=False))
            content = content[:at] + flipped + content[at + len(flipped) :]
    return content


@fuzz
@given(
    name=NAMES,
    edits=st.lists(EDITS, min_size=1, max_size=3),
    where=st.sampled_from(["length", "header", "weights", "config"]),
)
def test_any_bytes(
    saved: Adapters,
    name: str,
    edits: list[tuple[str, float, bytes]],
    where: str,
) -> None:
    config, weights = json.dumps(saved[name].config).encode(), saved[name].weights
    if where == "config":
        config = edited(config, edits, len(config))
    else:
        header = 8 + int.from_bytes(weights[:8], "little")
        spans = {"length": 8, "header": header, "weights": len(weights)}
        weights = edited(weights, edits, spans[where])
    read(config, weights, saved.table)


TALL = {"dtype": "F32", "shape": [0, 1 << 47], "data_offsets": [0, 0]}
HOSTILE = {
    "name twice": b'{"a": {}, "a": {}}',
    "not UTF-8": b'{"\xff": {}}',
    "lone surrogate": b'{"\\ud800": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}',
    "deep list": b"[" * 200_000,
    "deep object": b'{"a":' * 200_000,
    "long number": b'{"a": ' + b"9" * 100_000 + b"}",
    "empty and wide": json.dumps({"a": TALL}).encode(),
    "many dimensions": json.dumps({"a": {**TALL, "shape": [1] * 20_000}}).encode(),
    "nothing": b"{}",
    "many names": json.dumps({f"{i}": TALL for i in range(1_000)}).encode(),
}


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers(saved: Adapters, header: bytes) -> None:
    for content in (b"", b"\0" * 4):
        for name in ("lora", "loha"):
            assert not read(saved[name].config, packed(header, content), saved.table)


@pytest.mark.parametrize("value", [1e30, 3e38])
def test_huge_values_in_all_kinds(saved: Adapters, value: float) -> None:
    for each in saved.values():
        tensors = {
            name: torch.from_numpy(np.full(tensor.shape, value, np.float32))
            for name, tensor in each.tensors.items()
        }
        read(each.config, save(tensors), saved.table)
