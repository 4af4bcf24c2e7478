"""Compares how a step of requests applies an adapter with how the oracle does, for the check of
adapters in `weft.worker.selfcheck`, which says what is compared and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import AdapterQuarantined
from weft.kernels.linear import Weight
from weft.kernels.lora import AdapterPool, LoraStep
from weft.kernels.lora.base import ExpertStep, VocabularyStep
from weft.kernels.lora.extras import norms_of, vocabulary_of
from weft.kernels.lora.oracle import ImageStep
from weft.kernels.ops import Product


class Tolerance(NamedTuple):
    """How far a result may be off, in Frobenius norms: the part `effect` of the adapter's effect,
    plus the part `rounding` of the values with and without the adapter."""

    effect: float
    rounding: float

    def excess(self, deviation: float, effect: float, base: float) -> float:
        """The deviation as a multiple of what is allowed: above 1 is a mismatch, and so is NaN,
        which infinite values give."""
        with_it = math.hypot(effect, base)  # as the two are about orthogonal
        allowed = self.effect * effect + self.rounding * (with_it + base)
        return deviation / (allowed + torch.finfo(torch.float32).tiny)


def norms_between(got: Tensor, want: Tensor, base: Tensor) -> Tensor:
    """The Frobenius norms of the deviation, of the adapter's effect and of the base's part: fp32
    (3,). `base`: the values without the adapter."""
    got, want, base = got.float(), want.float(), base.float()
    parts = torch.stack((got - want, want - base, base)).flatten(1)
    norms: Tensor = torch.linalg.vector_norm(parts, dim=1)
    return norms


def layer_tolerance(dtype: torch.dtype) -> Tolerance:
    """How far one layer's output may be off. It is rounded once or twice, each time by a quarter
    of eps on average (eps: the distance of numbers at 1), so eps leaves a margin. The product with
    A may be rounded too, so that the effect is off by as much. In fp32 the order of summing some
    thousand products matters, which costs several digits more than eps."""
    eps = torch.finfo(dtype).eps
    return Tolerance(max(1e-3, 2 * eps), max(4e-6, eps))


def logits_tolerance(dtype: torch.dtype) -> Tolerance:
    """How far the logits may be off: the roundings of n layers add up, about as sqrt(n), and layers
    may amplify them."""
    eps = torch.finfo(dtype).eps
    return Tolerance(max(1e-2, 8 * eps), max(1e-3, 8 * eps))


class ComparedStep(LoraStep):
    """The LoraStep and NormStep of the oracle. It also runs the serving step on the same inputs,
    and records how far the results of that are off."""

    def __init__(
        self, served: LoraStep, oracle: ImageStep, pool: AdapterPool, num_rows: int
    ) -> None:
        self._served, self._oracle = served, oracle
        self._norms = norms_of(served)
        added = vocabulary_of(served)
        self.vocabulary = _ComparedVocabulary(self, added, oracle) if added is not None else None
        self._table = pool.table
        self._tolerance = layer_tolerance(pool.arena.dtype)
        # Made well ahead, as kernels may read slots before the kernels ahead of them have ended.
        self._no_slot_T = pool.rank_SL.new_full((num_rows,), -1)
        self._places: list[str] = []
        self._norms_at: list[Tensor] = []

    def check(self) -> None:
        """Raise AdapterQuarantined for the first place where they differ."""
        found = torch.stack(self._norms_at).tolist()
        for place, norms in zip(self._places, found, strict=True):
            excess = self._tolerance.excess(*norms)
            if not excess <= 1:
                raise mismatch(place, excess)

    def start(self, x_TI: Tensor, group: int) -> None:
        self._served.start(x_TI, group)

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None:
        self.compare(y_TO, x_TI, group, self._served.linear, self._oracle.linear)

    def product(
        self, x_TI: Tensor, weight: Weight, bias_O: Tensor | None, group: int
    ) -> Product | None:
        served = self._served.product(x_TI, weight, bias_O, group)
        if served is None:
            return None
        pending = served.pending
        base = weight.apply(x_TI, bias_O) if pending is None else served.y_TO
        want = base.clone()
        self._oracle.linear(want, x_TI, group)
        self.note(self.name(group), served.whole(), want, base)
        return Product(want, pending and replace(pending, slot_T=self._no_slot_T))

    def embedding(self, y_TO: Tensor, ids_T: Tensor, group: int) -> None:
        self.compare(y_TO, ids_T, group, self._served.embedding, self._oracle.embedding)

    def head(self, y_NV: Tensor, x_NI: Tensor, group: int) -> None:
        self.compare(y_NV, x_NI, group, self._served.head, self._oracle.head)

    def scaled_queries(self, q_THN: Tensor, group: int) -> Tensor:
        got, want = (s.scaled_queries(q_THN, group) for s in (self._served, self._oracle))
        self.note(self.name(group), got, want, q_THN)
        return want

    def absorbed_keys(self, y_THL: Tensor, q_THN: Tensor, group: int) -> None:
        self.compare(y_THL, q_THN, group, self._served.absorbed_keys, self._oracle.absorbed_keys)

    def absorbed_values(self, y_THV: Tensor, x_THL: Tensor, group: int) -> None:
        apply = self._served.absorbed_values, self._oracle.absorbed_values
        self.compare(y_THV, x_THL, group, *apply)

    def experts(self, token_P: Tensor, expert_P: Tensor) -> ExpertStep:
        served, oracle = (s.experts(token_P, expert_P) for s in (self._served, self._oracle))
        return _ComparedExperts(self, served, oracle, slice(int((expert_P >= 0).sum())))

    def pairs(self, expert_TK: Tensor, num_experts: int) -> ExpertStep | None:
        served = self._served.pairs(expert_TK, num_experts)
        if served is None:
            return None
        expert_P = expert_TK.flatten()
        expert_P = expert_P.where(expert_P < num_experts, -1)
        token_P = torch.arange(len(expert_P), device=expert_P.device) // expert_TK.shape[1]
        oracle = self._oracle.experts(token_P, expert_P)
        return _ComparedExperts(self, served, oracle, slice(None))

    def of(self, index: int) -> list[tuple[int, int, Tensor]]:
        wanted = self._oracle.of(index)
        got = self._norms.of(index) if self._norms is not None else []
        same = len(got) == len(wanted) and all(
            g[:2] == w[:2] and torch.equal(g[2], w[2]) for g, w in zip(got, wanted, strict=True)
        )
        if not same:
            raise mismatch(self._table.norms[index].name, torch.inf)
        return wanted

    def compare(self, y: Tensor, x: Tensor, group: int, served: _Apply, oracle: _Apply) -> None:
        """Apply the oracle to y, and the serving step to a copy, and note both results."""
        base, got = y.clone(), y.clone()
        served(got, x, group)
        oracle(y, x, group)
        self.note(self.name(group), got, y, base)

    def name(self, group: int) -> str:
        """The names of a group's projections, for messages."""
        first, *others = self._table.groups[group].slices
        return ", ".join([first.name, *(s.suffix for s in others)])

    def note(self, place: str, got: Tensor, want: Tensor, base: Tensor) -> None:
        """Record a comparison for `check`, so that the check waits for the device only once."""
        if got.shape != want.shape:
            raise mismatch(place, torch.inf)
        self._places.append(place)
        self._norms_at.append(norms_between(got, want, base))


_Apply = Callable[[Tensor, Tensor, int], None]


class _ComparedExperts:
    def __init__(
        self, step: ComparedStep, served: ExpertStep, oracle: ExpertStep, here: slice
    ) -> None:
        self._step, self._served, self._oracle, self._here = step, served, oracle, here

    def linear(self, y_PO: Tensor, x_PI: Tensor, group: int) -> None:
        y, x = y_PO[self._here], x_PI[self._here]  # rows without an expert here hold anything
        self._step.compare(y, x, group, self._served.linear, self._oracle.linear)


class _ComparedVocabulary:
    def __init__(self, step: ComparedStep, served: VocabularyStep, oracle: ImageStep) -> None:
        self._step, self._served, self._oracle = step, served, oracle

    def embedding(self, y_TO: Tensor, ids_T: Tensor) -> None:
        base, got = y_TO.clone(), y_TO.clone()
        self._served.embedding(got, ids_T)
        self._oracle.added_embedding(y_TO, ids_T)
        self._step.note("the embedding of added tokens", got, y_TO, base)

    def logits(self, y_NV: Tensor, x_NI: Tensor) -> Tensor:
        got = self._served.logits(y_NV.clone(), x_NI)
        want = self._oracle.added_logits(y_NV, x_NI)
        base = F.pad(y_NV, (0, want.shape[1] - y_NV.shape[1]))
        self._step.note("the logits of added tokens", known(got), known(want), base)
        return want


def known(logits: Tensor) -> Tensor:
    """The logits with 0 at tokens outside a row's vocabulary, where they are -inf."""
    return logits.masked_fill(logits == -torch.inf, 0)


def mismatch(place: str, excess: float) -> AdapterQuarantined:
    """The error for results that differ at `place`; `excess`: see `Tolerance`."""
    return quarantine(f"on a probe, {place} was off by {excess:.3g} times what rounding allows")


def quarantine(reason: str) -> AdapterQuarantined:
    """The error for an adapter that has failed its check."""
    return AdapterQuarantined(
        "the adapter failed its check on this device, and is not served until it is loaded and "
        f"passes: {reason}",
        "lora_path",
    )
