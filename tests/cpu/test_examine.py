"""The verdict that is told without torch is the one of packing, word for word."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from weft.checkpoint.examine import Examined, examine
from weft.checkpoint.pack import pack_image
from weft.checkpoint.read import AdapterFiles, files_of, parse_stored
from weft.core.errors import AdapterInvalid
from weft.core.targets import TargetTable

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SAVED = ("model.embed_tokens", "lm_head")
LAYER = "base_model.model.model.layers.1.self_attn."
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "o_proj"]}
# Around what rounds to zero and to infinity, and exactly halfway, in 16 bits and in 32.
EDGES = [
    *(0.0, -0.0, 1.0, -3.0, 65504.0, 65519.9, 65520.0, -65536.0, 2.0**-25, 2.0**-24, 2.9e-8),
    *(3.3895e38, 3.3961775e38, 3.3961776e38, -3.4028234e38, 2.0**-134, 1.5 * 2.0**-134, 1e-45),
    *(float("inf"), float("-inf"), float("nan")),
]


def adapter(
    a: float, b: float, dtype: torch.dtype, alpha: float = 2.0, **fields: Any
) -> AdapterFiles:
    """With one value in each of A and B of q_proj, o_proj being zero."""
    tensors = {
        LAYER + "q_proj.lora_A.weight": torch.zeros(2, 40),
        LAYER + "q_proj.lora_B.weight": torch.zeros(48, 2),
        LAYER + "o_proj.lora_A.weight": torch.zeros(2, 48),
        LAYER + "o_proj.lora_B.weight": torch.zeros(40, 2),
    }
    tensors[LAYER + "q_proj.lora_A.weight"][1, 7] = a
    tensors[LAYER + "q_proj.lora_B.weight"][33, 0] = b
    narrow = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return files_of(CONFIG | {"lora_alpha": alpha} | fields, narrow)


def verdict(files: AdapterFiles, table: TargetTable, dtype: torch.dtype) -> object:
    try:
        found = examine(files, table, str(dtype).removeprefix("torch."), 16)
    except AdapterInvalid as error:
        return error.param, error.message
    assert found is not None
    return found


def packed(files: AdapterFiles, table: TargetTable, dtype: torch.dtype) -> object:
    try:
        image = pack_image(files, table, dtype, 16)
    except AdapterInvalid as error:
        return error.param, error.message
    return Examined(
        image.digest,
        image.layout,
        image.targets,
        image.num_bytes,
        image.provisional,
        image.conversion_error,
    )


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.exhaustive) if dtype == torch.float32 else dtype
        for dtype in DTYPES
    ],
    ids=str,
)
def test_values_at_the_edges(table: TargetTable, dtype: torch.dtype) -> None:
    seen = set()
    cases = [(value, 1.0, 2.0) for value in EDGES]
    cases += [(1.0, value, alpha) for value in EDGES for alpha in (2.0, -3.0, 1e-3)]
    for (a, b, alpha), stored in itertools.product(cases, DTYPES):
        files = adapter(a, b, stored, alpha)
        told = verdict(files, table, dtype)
        assert told == packed(files, table, dtype), (a, b, stored, alpha)
        seen.add(told[1].rpartition(": ")[2] if isinstance(told, tuple) else "served")
    name = str(dtype).removeprefix("torch.")
    nothing = "A or B is zero in every target"
    assert seen >= {"served", nothing, "holds NaN or infinite values"}
    assert f"holds values too large for {name}" in seen


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 3},
        {"target_modules": ["q_proj"]},
        {"exclude_modules": ["o_proj"]},
        {"use_dora": True},
        {"bias": "all"},
        {"alpha_pattern": {"q_proj": "x"}},
        {"use_rslora": True, "rank_pattern": {"1.self_attn.q": 9}},
        {"shiny": 1},
    ],
    ids=str,
)
def test_configs(table: TargetTable, fields: dict[str, Any]) -> None:
    files = adapter(1.0, 1.0, torch.float32, **fields)
    assert verdict(files, table, torch.float32) == packed(files, table, torch.float32)


def test_added_tokens_are_left_to_packing(table: TargetTable) -> None:
    tensors = {f"base_model.model.{m}.weight": torch.ones(70, 40) for m in SAVED}
    tensors[LAYER + "q_proj.lora_A.weight"] = torch.ones(2, 40)
    tensors[LAYER + "q_proj.lora_B.weight"] = torch.ones(48, 2)
    config = CONFIG | {"target_modules": ["q_proj"]}
    assert examine(files_of(config, tensors), table, "float32", 16) is None


ROWS = [f"{LAYER}q_proj.{part}" for part in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")]
OTHERS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int]]]] = {
    "IA3": ({"feedforward_modules": []}, {f"{LAYER}q_proj.ia3_l": (48, 1)}),
    "ADALORA": (
        {"init_r": 2, "lora_alpha": 3},
        {
            f"{LAYER}q_proj.lora_A": (2, 40),
            f"{LAYER}q_proj.lora_B": (48, 2),
            f"{LAYER}q_proj.lora_E": (2, 1),
        },
    ),
    "VERA": (
        {"r": 2},
        {
            "base_model.vera_A": (2, 40),
            "base_model.vera_B": (48, 2),
            f"{LAYER}q_proj.vera_lambda_b": (48,),
            f"{LAYER}q_proj.vera_lambda_d": (2,),
        },
    ),
    "LOHA": ({"r": 2, "alpha": 3}, dict(zip(ROWS, [(48, 2), (2, 40)] * 2, strict=True))),
    "LOKR": (
        {"r": 1, "alpha": -3},
        {
            f"{LAYER}q_proj.lokr_w1": (6, 5),
            f"{LAYER}q_proj.lokr_w2_a": (8, 1),
            f"{LAYER}q_proj.lokr_w2_b": (1, 8),
        },
    ),
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=() if (i - j) % 3 == 0 else pytest.mark.exhaustive)
        for i, kind in enumerate(OTHERS)
        for j, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
def test_values_of_other_kinds(table: TargetTable, kind: str, dtype: torch.dtype) -> None:
    """One of a tensor's, or all of them: also those whose products are zero, or too large."""
    fields, shapes = OTHERS[kind]
    config = {"peft_type": kind, "target_modules": ["q_proj"]} | fields
    seen = set()
    values = [0.0, 1e-30, 1e-5, 300.0, 7e4, 1e30, float("inf")]
    for name, value, whole in itertools.product(shapes, values, (True, False)):
        generator = torch.Generator().manual_seed(0)
        tensors = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
        (tensors[name] if whole else tensors[name][-1]).fill_(value)
        for alpha in (3.0, 1e300):
            scaled = {field: alpha for field in fields if "alpha" in field}
            files = files_of(config | scaled, tensors)
            told = verdict(files, table, dtype)
            assert told == packed(files, table, dtype), (name, value, whole, alpha)
            seen.add(told[1].rpartition(": ")[2] if isinstance(told, tuple) else "served")
    assert {"served", "holds NaN or infinite values"} <= seen
    assert kind == "IA3" or "A or B is zero in every target" in seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_magnitude(dtype: torch.dtype) -> None:
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[250_000] = -77.0
    (stored,) = parse_stored(files_of({}, {"a": values}).weights).values()
    assert stored.largest() == 77.0
    values[-1] = float("nan")
    (stored,) = parse_stored(files_of({}, {"a": values}).weights).values()
    assert np.isnan(stored.largest())
    (empty,) = parse_stored(files_of({}, {"a": values[:0]}).weights).values()
    assert empty.largest() == 0.0
