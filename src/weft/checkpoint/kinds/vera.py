"""VeRA: diag(b) B diag(d) A, with one random A and B for all targets."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.fields import flag, integer
from weft.checkpoint.kinds.base import LAYERS, Kind, LinearModule, PeftAdapter, check_stated, peaks
from weft.checkpoint.parts import AdapterParts, Array, TargetParts
from weft.checkpoint.refuse import refuse, show

_SHARED = ("base_model.vera_A", "base_model.vera_B")


def _sort(adapter: PeftAdapter) -> AdapterParts:
    modules, rank = adapter.modules(), adapter.config.r
    shared_a, shared_b = _projections(adapter, modules)
    peaks_b = cache(lambda: peaks(shared_b))
    peaks_a = cache(lambda width: peaks(shared_a[:, :width]))

    def pair(module: LinearModule) -> TargetParts:
        target = module.target
        d = module.get("vera_lambda_d", rank).values()[:, None]
        b = module.get("vera_lambda_b", target.out_features).values()[:, None]
        own_a, own_b = shared_a[:, : target.in_features], shared_b[: target.out_features]
        return module.lora(
            rank,
            lambda: own_a * d,
            lambda: own_b * b,
            lambda: (peaks_a(target.in_features) * abs(d)).max(),
            lambda: (peaks_b()[: len(b)] * abs(b)).max(),
        )

    return AdapterParts([pair(module) for module in modules])


def _projections(adapter: PeftAdapter, modules: list[LinearModule]) -> list[Array]:
    """The A and B whose beginnings all targets share."""
    num_in = max(module.target.in_features for module in modules)
    num_out = max(module.target.out_features for module in modules)
    saved = flag(adapter.config.options, "save_projection", True)
    for name in _SHARED:
        if saved and name not in adapter.tensors:
            refuse(name, "is missing, but save_projection says that it was saved")
        if not saved and name in adapter.tensors:
            refuse(name, "is there, but save_projection says that it is not to be used")
    if not saved:
        return _regenerated(adapter.config, num_in, num_out)
    shapes = (adapter.config.r, num_in), (num_out, adapter.config.r)
    return [
        check_stated(adapter.tensors[name], *shape).values()
        for name, shape in zip(_SHARED, shapes, strict=True)
    ]


def _regenerated(config: PeftConfig, num_in: int, num_out: int) -> list[Array]:
    """A and B as PEFT draws them from the config's key, in this order from one generator.

    torch's for the CPU is the Mersenne Twister, of whose words 24 bits make a float32.
    """
    seed = integer(config.options, "projection_prng_key", 0)
    if not -(1 << 63) <= seed < 1 << 63:
        refuse("projection_prng_key", f"must fit 64 bits, got {show(seed)}")
    generator = np.random.RandomState(seed & 0xFFFFFFFF)

    def draw(rows: int, columns: int) -> Array:
        bound = np.float32(math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(columns)))
        words = np.frombuffer(generator.bytes(4 * rows * columns), "<u4")
        # Rounded once, as a multiplication and an addition in one are.
        drawn = (words & 0xFFFFFF) * 2.0**-24 * np.float64(bound + bound) - np.float64(bound)
        return drawn.astype(np.float32).reshape(rows, columns)

    return [draw(config.r, num_in), draw(num_out, config.r)]


KIND = Kind(
    peft_type="VERA",
    title="VeRA",
    sort=_sort,
    tensors=("vera_lambda_b", "vera_lambda_d"),
    shared=_SHARED,
    read=LAYERS | {"projection_prng_key", "r", "save_projection"},
    harmless=frozenset({"d_initial", "init_weights", "vera_dropout"}),
    rank=("r", 256),
    rank_is_images=True,
)
