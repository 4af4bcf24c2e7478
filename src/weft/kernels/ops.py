"""What a decoder layer does between its matrix products, as one interface with two homes: plain
torch here, for any device, and fused Triton kernels in `weft.kernels.triton_ops`.

Shapes: T token rows, I hidden size, F intermediate width, H query heads, K key and value heads,
D head dimension.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from weft.core.errors import ConfigError
from weft.kernels.activation import silu_and_mul
from weft.kernels.attention import AttentionBatch, KVCache, torch_attend, write_kv
from weft.kernels.norm import rms_norm
from weft.kernels.product import Product
from weft.kernels.rope import apply_rope


class Ops(Protocol):
    def rms_norm(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """Norm rows as `weft.kernels.norm.rms_norm` does."""
        ...

    def add_rms_norm(
        self,
        x_TI: Tensor,
        delta: Product,
        weight_I: Tensor,
        eps: float,
    ) -> Tensor:
        """Add `delta` to `x` in place, and return the norm of the sum."""
        ...

    def silu_and_mul(self, gate_up: Product) -> Tensor:
        """Compute what `weft.kernels.activation.silu_and_mul` does."""
        ...

    def rope_and_write(
        self,
        qkv: Product,
        rope: tuple[Tensor, Tensor],
        norm_ND: Tensor | None,
        eps: float,
        cache: KVCache,
        batch: AttentionBatch,
    ) -> Tensor:
        """Norm (if there are weights for it) and rotate q and k, write k and v to the cache.

        A row of `qkv` holds H query, K key and K value heads of the cache's D; it may be changed.
        `rope` is what `weft.models.rope.RopeTable.at` gives, `norm_ND` (H + K, D), or row by row
        (T, H + K, D). Returns q, (T, H, D).
        """
        ...

    def attend(
        self,
        q_THD: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend as `weft.kernels.attention.Attend` states."""
        ...


class TorchOps:
    """Ops of plain torch operations."""

    def rms_norm(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        return rms_norm(x_TI, weight_I, eps)

    def add_rms_norm(
        self,
        x_TI: Tensor,
        delta: Product,
        weight_I: Tensor,
        eps: float,
    ) -> Tensor:
        x_TI += delta.whole()
        return rms_norm(x_TI, weight_I, eps)

    def silu_and_mul(self, gate_up: Product) -> Tensor:
        return silu_and_mul(gate_up.whole())

    def rope_and_write(
        self,
        qkv: Product,
        rope: tuple[Tensor, Tensor],
        norm_ND: Tensor | None,
        eps: float,
        cache: KVCache,
        batch: AttentionBatch,
    ) -> Tensor:
        K, D = cache.k.shape[2:]
        qkv_TND = qkv.whole().view(-1, qkv.y_TO.shape[1] // D, D)
        H = qkv_TND.shape[1] - 2 * K
        qk_TND, v_TKD = qkv_TND.split_with_sizes((H + K, K), 1)
        if norm_ND is not None:
            qk_TND = rms_norm(qk_TND, None, eps) * norm_ND
        q_THD, k_TKD = apply_rope(qk_TND, *rope).split_with_sizes((H, K), 1)
        write_kv(k_TKD, v_TKD, cache, batch)
        return q_THD

    def attend(
        self,
        q_THD: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        return torch_attend(q_THD, cache, batch, scale=scale, window=window)


def make_ops(name: str, device: torch.device) -> Ops:
    """Make the ops of that name; "auto" is triton on a CUDA device, else torch.

    Raises ConfigError when there are none of that name, or they can't run there.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        return TorchOps()
    if name == "triton":
        from weft.kernels.triton_ops import TritonOps

        return TritonOps(device)
    raise ConfigError(f"there are no ops named {name!r}; there are: torch, triton", "ops")
