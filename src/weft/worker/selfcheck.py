"""Checks whether the device computes a registered adapter as its image says.

A probe of a few tokens goes through the model twice: with the tables and kernels of requests, over
adapter memory for this one adapter, and with the oracle (`weft.kernels.lora.oracle`) instead. It is
compared

    at every layer, from the same input: the layer's output by the serving step and by the oracle
    at the end: the logits of the two passes

The batch has the probe's tokens twice: as rows of the base, which adapters must not change, and as
rows of the adapter. Their difference is the adapter's effect; deviations are measured against it.

At one layer, two right results differ by the rounding of one output. Over the model, roundings add
up: in 16 bits, a wrong matrix of a single layer would be lost in the noise of the logits. And if a
model itself turns small differences into jumps (the choice of experts, inputs rounded to 8 bits),
the logits of two right passes may differ by any amount, and are not compared.

Steps run meanwhile. The check pauses between layers, so that it takes a tenth of the time.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.checkpoint.pack import AdapterImage
from weft.core.errors import AdapterQuarantined, WeftError
from weft.core.stats import CheckResult
from weft.core.targets import ImageLayout, TargetTable, layout_of
from weft.kernels.attention import make_batch
from weft.kernels.collective.base import ALONE, Ranks
from weft.kernels.delta import StateRows
from weft.kernels.lora import AdapterPool, LoraBackend, LoraBatch, LoraStep, Segment
from weft.kernels.lora.base import NormStep, VocabularyStep
from weft.kernels.lora.extras import norms_of, vocabulary_of, with_extras
from weft.kernels.lora.oracle import ImageStep
from weft.models.decoder import Decoder, LayerCache, StepContext
from weft.worker.compared import (
    ComparedStep,
    known,
    logits_tolerance,
    mismatch,
    norms_between,
    quarantine,
)
from weft.worker.protocol import ProbeResult
from weft.worker.step import StepTensors, hidden_states, logits

TOKENS = 8
"""The length of the probe."""
SAMPLED = 2
"""How many of its last tokens have their logits computed."""
OWN_TOKENS = 4
"""The most tokens of the probe for which the adapter has rows of its own."""
SLOT = 0
"""The slot of the one adapter that is checked."""
SHARE = 0.1
"""The share of the time that a paced check takes while steps run."""
MAX_PAUSE_S = 0.05
"""The longest pause after a layer, whose measured time may include compiling kernels."""
BUSY_S = 0.25
"""For how long after the launch of a step more steps are expected, so that checks make pauses."""


class Activity:
    """Knows when a step was last launched."""

    def __init__(self) -> None:
        self._launched_s = -math.inf

    def note(self) -> None:
        self._launched_s = time.monotonic()

    def is_recent(self) -> bool:
        return time.monotonic() - self._launched_s < BUSY_S


class SelfCheck:
    """Checks images, one at a time, beside steps. `decoder` must not share anything that it writes
    to with the steps' decoder. `exact`: whether small differences stay small through the model, so
    that logits can be compared.
    """

    def __init__(
        self,
        decoder: Decoder,
        table: TargetTable,
        make_backend: Callable[[AdapterPool], LoraBackend],
        kv: list[LayerCache],
        block_size: int,
        is_busy: Callable[[], bool],
        *,
        exact: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        """`kv`: of `num_blocks` blocks a layer, or two states. `is_busy`: whether steps run."""
        self._decoder, self._table, self._make_backend = decoder, table, make_backend
        self._kv, self._block_size = kv, block_size
        self._is_busy = is_busy
        self._ranks = ranks
        self._exact, self._passed = exact, set[ImageLayout]()
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        if decoder.device.type == "cuda":
            self._stream = torch.cuda.Stream(decoder.device)  # type: ignore[no-untyped-call]
        source = random.Random(0)
        self._ids = [source.randrange(table.groups[0].in_features) for _ in range(TOKENS)]

    def check(self, image: AdapterImage, *, paced: bool) -> CheckResult:
        """Check an image, on any thread. An image without extras passes at once if another one with
        its layout has passed. `paced`: take a tenth of the time while steps run. Returns "skipped"
        without memory, or if values overflow. Raises AdapterQuarantined."""
        with self._lock, torch.inference_mode(), self._aside():
            layout = image.layout
            if layout in self._passed and not (layout.has_extras or layout.vocab_size):
                return "passed"
            try:
                return self._check(image, paced)
            except (torch.OutOfMemoryError, MemoryError):
                return "skipped"
            except AdapterQuarantined:
                raise
            except Exception as error:  # a step with this adapter would end all requests
                raise quarantine(f"{type(error).__name__}: {error}") from error

    def rehearse(self) -> None:
        """Check an adapter that changes nothing, so that the kernels of checks are loaded."""
        of = layout_of(self._table, (1,) * len(self._table.targets))
        zeros = torch.zeros(of.num_elements, dtype=self._decoder.dtype)
        self.check(AdapterImage("", of, zeros, ()), paced=False)
        self._passed.clear()

    def _aside(self) -> contextlib.AbstractContextManager[object]:
        """A context with a CUDA stream of the check's own."""
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    # -- the check -----------------------------------------------------------------------------

    def _check(self, image: AdapterImage, paced: bool) -> CheckResult:
        pool = self._installed(image)
        backend = self._make_backend(pool)
        probe = _Probe.make(self._tokens(image), self._block_size, self._decoder.device)
        rows, own_rank = (TOKENS, SAMPLED, 2 * TOKENS), self._ranks.rank
        oracle = ImageStep(self._table, image.layout, pool.arena, *rows, own_rank)
        compared = ComparedStep(_served(backend, pool, probe), oracle, pool, 2 * TOKENS)
        right = self._logits(probe, compared, compared, compared.vocabulary, paced)
        if not bool(right.isfinite().all()):
            return "skipped"  # even the oracle overflows in this dtype
        compared.check()
        if self._exact:
            step = _served(backend, pool, probe)
            got = self._logits(probe, step, norms_of(step), vocabulary_of(step), paced)
            base = right[:SAMPLED].repeat(2, 1)
            norms = norms_between(got, right, base).tolist()
            excess = logits_tolerance(self._decoder.dtype).excess(*norms)
            if not excess <= 1:
                raise mismatch("the logits", excess)
        self._passed.add(image.layout)
        return "passed"

    def _installed(self, image: AdapterImage) -> AdapterPool:
        """Adapter memory with nothing else in it. Raises MemoryError."""
        dtype, device = self._decoder.dtype, self._decoder.device
        try:
            pool = AdapterPool(self._table, len(image.data), 1, dtype, device, self._ranks)
        except RuntimeError as error:  # of any of torch's allocators
            raise MemoryError(str(error)) from error
        if self._stream is not None:
            # A check that was broken off may still be writing where the arena is now, and `write`
            # is on another stream.
            self._stream.synchronize()
        pool.write(0, image.data)
        pool.install(SLOT, 0, image.layout)
        return pool

    def _layers(self, paced: bool) -> Iterator[LayerCache]:
        """Yields each layer's cache, with a pause after each layer if the check is paced."""
        began = time.thread_time()
        for cache in self._kv:
            yield cache
            if paced and self._is_busy():
                worked = time.thread_time() - began
                time.sleep(min(worked * (1 / SHARE - 1), MAX_PAUSE_S))
            began = time.thread_time()

    def _tokens(self, image: AdapterImage) -> list[int]:
        """The tokens of the probe; the first ones are tokens with rows of the adapter's own."""
        own: list[int] = []
        for at in (image.layout.embedding_rows, image.layout.head_rows):
            if at and at[1] >= 0:
                words = at[2] * 4 // image.data.element_size()
                own += image.data[at[1] : at[1] + words].view(torch.int32)[:OWN_TOKENS].tolist()
        if image.layout.vocab_size:
            own.insert(0, image.layout.vocab_size - 1)
        size = image.layout.vocab_size or self._table.groups[0].in_features
        return (own[:OWN_TOKENS] + [i % size for i in self._ids])[:TOKENS]

    def _logits(
        self,
        probe: _Probe,
        lora: LoraStep,
        norms: NormStep | None,
        vocabulary: VocabularyStep | None,
        paced: bool,
    ) -> Tensor:
        """fp32 (2 * SAMPLED, V), the base's rows first; 0 at tokens outside a row's vocabulary."""
        batch = make_batch(
            [TOKENS] * 2, [TOKENS] * 2, probe.blocks, self._block_size, self._decoder.device
        )
        states = StateRows([0, 1], batch.query_start)
        context = StepContext(probe.positions_T, batch, lora, norms, vocabulary, states)
        step = StepTensors(probe.ids_T, None, probe.sampled_N, context)
        hidden_TI = hidden_states(self._decoder, step, self._layers(paced))
        return known(logits(self._decoder, step, hidden_TI).float())


def probed(
    check: SelfCheck, image: AdapterImage, paced: bool, clock: Callable[[], float]
) -> ProbeResult:
    """The outcome of a check, and the seconds that it took."""
    begin = clock()
    try:
        result = check.check(image, paced=paced)
    except AdapterQuarantined as error:
        return ProbeResult("failed", clock() - begin, error)
    return ProbeResult(result, clock() - begin, None)


def worst(results: Sequence[ProbeResult | WeftError]) -> ProbeResult | WeftError:
    """The worst of all ranks' results: an error, else a failure, else a skipped check, else the
    slowest check."""

    def badness(result: ProbeResult | WeftError) -> tuple[int, float]:
        if isinstance(result, WeftError):
            return 3, 0.0
        return ("passed", "skipped", "failed").index(result.result), result.seconds

    return max(results, key=badness)


def num_blocks(block_size: int) -> int:
    """How many blocks of KV cache a check needs."""
    return 2 * -(-TOKENS // block_size)


@dataclass(frozen=True, slots=True)
class _Probe:
    """The batch of a check: two sequences of the same tokens, the base's and the adapter's."""

    ids_T: Tensor
    positions_T: Tensor
    sampled_N: Tensor
    lora: LoraBatch
    blocks: list[list[int]]

    @staticmethod
    def make(ids: list[int], block_size: int, device: torch.device) -> _Probe:
        width = num_blocks(block_size) // 2
        sampled = [*range(TOKENS - SAMPLED, TOKENS), *range(2 * TOKENS - SAMPLED, 2 * TOKENS)]
        slots = torch.tensor([-1] * TOKENS + [SLOT] * TOKENS, dtype=torch.int32, device=device)
        sampled_N = torch.tensor(sampled, device=device)
        return _Probe(
            torch.tensor(ids * 2, device=device),
            torch.arange(TOKENS, device=device).repeat(2),
            sampled_N,
            LoraBatch(
                slots,
                (Segment(SLOT, TOKENS, 2 * TOKENS),),
                slots[sampled_N],
                (Segment(SLOT, SAMPLED, 2 * SAMPLED),),
            ),
            [[*range(width)], [*range(width, 2 * width)]],
        )


def _served(backend: LoraBackend, pool: AdapterPool, probe: _Probe) -> LoraStep:
    """The step that the probe's rows would have if requests had sent them."""
    return with_extras(backend.begin(probe.lora), pool, probe.lora)
