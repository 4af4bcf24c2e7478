"""VB-LoRA, a kind of PEFT adapter that Weft does not know by itself, added from outside.

Each row of A and each column of B consists of short vectors, and each of those is a mixture of the
`topk` best vectors of one bank that all modules share:

    A[i] = concatenation over tiles t of  sum over k of softmax(best logits[i, t])[k] * bank[k]

So an adapter is an ordinary B A of rank r, and is served exactly. A package that ships this file
makes it known to Weft with an entry point:

    [project.entry-points."weft.adapter_kinds"]
    VBLORA = "vblora:KIND"
"""

from __future__ import annotations

import numpy as np

from weft.checkpoint.fields import integer
from weft.checkpoint.kinds.base import LAYERS, Kind, LinearModule, PeftAdapter, check_stated
from weft.checkpoint.parts import AdapterParts, Array, TargetParts
from weft.checkpoint.refuse import refuse

BANK = "base_model.vblora_vector_bank"


def sort(adapter: PeftAdapter) -> AdapterParts:
    config, modules = adapter.config, adapter.modules()
    num_vectors = integer(config.options, "num_vectors", 256)
    length = integer(config.options, "vector_length", 256)
    topk = integer(config.options, "topk", 2)
    if BANK not in adapter.tensors:
        refuse(BANK, "is missing")
    if not 1 <= topk <= num_vectors:
        refuse("topk", f"must be in [1, {num_vectors}], got {topk}")
    bank = check_stated(adapter.tensors[BANK], num_vectors, length).values()

    def mix(logits: Array) -> Array:
        """(..., num_vectors) -> (..., length)"""
        best = np.argpartition(-logits, topk - 1)[..., :topk]
        weights = np.take_along_axis(logits, best, -1)
        weights = np.exp(weights - weights.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("...k,...kl->...l", weights, bank[best])

    def pair(module: LinearModule) -> TargetParts:
        r, target = config.r, module.target
        if length < 1 or target.in_features % length or target.out_features % length:
            refuse("vector_length", f"{length} does not divide the sides of {target.name}")
        a = module.get("vblora_logits_A", r, target.in_features // length, num_vectors)
        b = module.get("vblora_logits_B", target.out_features // length, r, num_vectors)
        return module.lora(
            r,
            lambda: mix(a.values()).reshape(r, -1),
            lambda: mix(b.values()).swapaxes(1, 2).reshape(-1, r),
        )

    return AdapterParts([pair(module) for module in modules])


KIND = Kind(
    peft_type="VBLORA",
    title="VB-LoRA",
    sort=sort,
    tensors=("vblora_logits_A", "vblora_logits_B"),
    shared=(BANK,),
    read=LAYERS | {"exclude_modules", "num_vectors", "r", "topk", "vector_length"},
    harmless=frozenset({"init_logits_std", "init_vector_bank_bound", "vblora_dropout"}),
    refused={"save_only_topk_weights": "only whole logits are served; save the adapter with false"},
    rank=("r", 4),
    rank_is_images=True,
)
