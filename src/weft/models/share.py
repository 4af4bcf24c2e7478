"""The shape of one rank's share of a model."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from weft.core.errors import ConfigError
from weft.core.units import EXPERT_UNIT
from weft.models.config import ModelConfig
from weft.models.family import MoeConfig


def share_of(config: ModelConfig, size: int) -> ModelConfig:
    """The shape of one of `size` ranks' share: some of the heads, and a share of the widths of the
    MLP and of the experts. With fewer key and value heads than ranks, several ranks have the same
    ones. The vocabulary stays whole; see `weft.core.shards`.

    Raises ConfigError, naming the field, for what can't be divided."""
    moe, linear = config.moe, config.linear
    shapes = {config.layer(i) for i in range(config.num_layers)}
    widths = {"num_attention_heads": config.num_heads, "vocab_size": config.vocab_size}
    if any(config.has_mlp(i) for i in range(config.num_layers)):
        widths["intermediate_size"] = gcd(*(shape.intermediate_size for shape in shapes))
    if moe is not None:
        widths["shared_expert_intermediate_size"] = moe.shared_size
        moe = _share_of_experts(moe, size)
    if linear is not None:
        widths |= linear.divided
    for kv in (shape.num_kv_heads for shape in shapes):
        if kv % size and size % kv:
            widths["num_key_value_heads"] = kv
    for name, width in widths.items():
        if width % size:
            message = f"--tensor-parallel-size {size} does not divide the model's {name} {width}"
            raise ConfigError(message, "tensor_parallel_size")
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(config.num_kv_heads // size, 1),
        intermediate_size=config.intermediate_size // size,
        layers=tuple(
            replace(
                shape,
                num_kv_heads=max(shape.num_kv_heads // size, 1),
                intermediate_size=shape.intermediate_size // size,
            )
            for shape in config.layers
        ),
        moe=moe,
        linear=linear and linear.share_of(size),
    )


def _share_of_experts(moe: MoeConfig, size: int) -> MoeConfig:
    """A share of the width of each expert; or, if kernels for few rows can't take that width, some
    whole experts. docs/decisions/0020 says why. Raises ConfigError if neither can be divided."""
    width, num = moe.intermediate_size, moe.num_experts
    moe = replace(moe, shared_size=moe.shared_size // size)
    unit = EXPERT_UNIT if moe.gated else 2 * EXPERT_UNIT
    if num % size == 0 and width % (size * unit):
        return replace(moe, expert_ranks=size)
    if width % size:
        raise ConfigError(
            f"--tensor-parallel-size {size} divides neither the model's intermediate_size of"
            f" experts {width} nor their number {num}",
            "tensor_parallel_size",
        )
    return replace(moe, intermediate_size=width // size)
