"""The verdict that is told without torch is the one of packing, word for word."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from weft.checkpoint import AdapterFiles, files_of, pack_image
from weft.checkpoint.examine import Examined, examine, largest_magnitude
from weft.checkpoint.read import parse_stored
from weft.core.errors import AdapterInvalid
from weft.core.targets import TargetTable

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
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
    return Examined(image.digest, image.layout, image.targets, image.num_bytes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "LOHA"},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1]},
        {"ensure_weight_tying": True},
        {"init_lora_weights": "pissa"},
        {"alora_invocation_tokens": [1, 2]},
    ],
    ids=str,
)
def test_what_is_left_to_packing(table: TargetTable, fields: dict[str, Any]) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "lora_alpha"} | fields
    files = files_of(config, {LAYER + "q_proj.lora_A.weight": torch.ones(2, 40)})
    assert examine(files, table, "float32", 16) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_magnitude(dtype: torch.dtype) -> None:
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[250_000] = -77.0
    (stored,) = parse_stored(files_of({}, {"a": values}).weights).values()
    assert largest_magnitude(stored) == 77.0
    values[-1] = float("nan")
    (stored,) = parse_stored(files_of({}, {"a": values}).weights).values()
    assert np.isnan(largest_magnitude(stored))
    (empty,) = parse_stored(files_of({}, {"a": values[:0]}).weights).values()
    assert largest_magnitude(empty) == 0.0
