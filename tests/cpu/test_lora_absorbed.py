"""What adapters add in absorbed projections, by every LoRA backend, against the oracle."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from lora_pools import batch_of, random_pool
from tables import build_table
from torch import Tensor

from weft.kernels.lora import AdapterPool, LoraStep, make_backend

HEADS, KEY, VALUE, LATENT = 3, 20, 9, 40
TABLE = build_table([("linear", LATENT, [("kv_b", HEADS * (KEY + VALUE))])])
RANKS = [(16,), (0,), (3,), (33,)]
SLOTS = [-1] * 3 + [0] * 2 + [1] * 2 + [3] * 35 + [2]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6}


@pytest.fixture(params=["torch", "triton, few", "triton, many"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels have heads of several blocks of inputs and outputs, and programs of several tiles."""
    name, _, rows = request.param.partition(", ")
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            pytest.skip("Triton is not installed")
        from weft.kernels.lora import triton_absorbed

        monkeypatch.setattr(triton_absorbed, "BLOCK", 16)
        monkeypatch.setattr(triton_absorbed, "PROGRAMS", 5)
        monkeypatch.setattr(triton_absorbed, "FEW_ROWS", 64 if rows == "few" else 8)
    return str(name)


def apply(
    name: str, pool: AdapterPool, slots: list[int], inputs: dict[str, tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """What the products of keys and of values become in a step of these rows."""
    step: LoraStep = make_backend(name, pool).begin(batch_of(slots))
    out = {}
    for method, (x, y) in inputs.items():
        wide = torch.zeros(*y.shape[:2], y.shape[2] + 5, dtype=y.dtype)
        out[method] = wide[..., : y.shape[2]]
        out[method].copy_(y)
        getattr(step, method)(out[method], x, 0)
        assert not wide[..., y.shape[2] :].any()
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_backends_add_to_keys_and_values(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool = random_pool(TABLE, RANKS, dtype, std=0.2)
    sizes = {"absorbed_keys": (KEY, LATENT), "absorbed_values": (LATENT, VALUE)}
    inputs = {
        method: (
            torch.randn(len(SLOTS), HEADS, num_inputs).to(dtype),
            torch.randn(len(SLOTS), HEADS, num_outputs).to(dtype),
        )
        for method, (num_inputs, num_outputs) in sizes.items()
    }
    got, want = (apply(name, pool, SLOTS, inputs) for name in (backend, "reference"))
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for method, (_, y) in inputs.items():
        same = torch.tensor([slot in (-1, 1) for slot in SLOTS])
        assert torch.equal(got[method][same], y[same])
        assert not torch.isclose(got[method][~same], y[~same]).all(-1).any()


def test_a_row_s_bits_don_t_depend_on_others(backend: str) -> None:
    if backend != "triton":
        pytest.skip("segments of other sizes are summed in another order")
    torch.manual_seed(0)
    pool = random_pool(TABLE, RANKS)
    x, y = torch.randn(len(SLOTS), HEADS, KEY), torch.randn(len(SLOTS), HEADS, LATENT)
    together = apply("triton", pool, SLOTS, {"absorbed_keys": (x, y)})["absorbed_keys"]
    rows = slice(-5, None)
    few = {"absorbed_keys": (x[rows], y[rows])}
    assert torch.equal(apply("triton", pool, SLOTS[rows], few)["absorbed_keys"], together[rows])
