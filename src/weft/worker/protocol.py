"""The protocol of a device's worker: a few verbs, carried out in the order of their calls.

    flight = worker.step(inputs)    returns at once
    result = flight.result()        waits for the tokens

The engine knows workers by this protocol alone, so a worker may pass each verb on to several
devices. The engine only hands images around, and never reads their data.

    registration    pack ──> probe ──> (stage)           folder, or image file ──> host
    load            clear, move, load ──> install        host, or disk ──> device
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weft.checkpoint.compose import Summand
from weft.checkpoint.pack import AdapterImage
from weft.core.adapters import AdapterSource
from weft.core.errors import AdapterQuarantined, WeftError
from weft.core.stats import CheckResult, TierStats
from weft.schedule.extents import Extent, Move
from weft.schedule.plan import StepResult
from weft.worker.inputs import StepInputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The constant facts of a worker: its model, and the sizes of its KV cache (`num_blocks`), its
    slot table (`num_slots`) and its memory for adapters."""

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    weights: str
    """See `EngineInfo.weights`."""
    max_model_len: int
    num_blocks: int
    num_states: int
    """Recurrent states, 0 for a model that has none."""
    num_snapshots: int
    """Places for copies of such states at the end of cached prefixes."""
    num_slots: int
    adapter_elements: int
    """The size of adapter memory, in elements of `element_bytes`."""
    element_bytes: int
    num_ranks: int
    """Devices, each of which has a part of the model and of every image; sizes of adapter memory
    and of the KV cache are those of one."""
    host_bytes: int
    host_in_one_piece: bool
    """Whether images on the host lie in extents of one piece of memory."""
    has_checks: bool
    """Whether adapters are probed before they are registered."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to read an adapter: its image on the host, else its image file, else `sources`."""

    digest: str
    image: AdapterImage | None
    sources: tuple[AdapterSource, ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Order to bring an adapter, or a weighted sum of adapters, to adapter memory."""

    origin: Origin
    parts: tuple[tuple[Origin, float], ...]
    """The adapters to sum, with their weights; empty for a single adapter."""
    start: int
    """Its first element in adapter memory."""
    extent: Extent | None
    """Where the image goes on the host, unless it is there already."""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An image that was packed, or read from its file; and the seconds by stage (LOAD_STAGES)."""

    image: AdapterImage
    stage_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The image that was loaded, or an error; and the seconds by stage (LOAD_STAGES)."""

    image: AdapterImage | WeftError
    anew: bool
    """Whether the image is not the one that `LoadOrder.origin` had on the host."""
    stage_s: dict[str, float]
    num_faults: int
    """How many copies to the device had wrong checksums."""


class ProbeResult(NamedTuple):
    result: CheckResult
    seconds: float
    error: AdapterQuarantined | None


class Flight(Protocol):
    def result(self) -> StepResult:
        """Wait for the step's tokens. Raises what the forward pass raised."""


class Worker(Protocol):
    """See `weft.worker.worker.DeviceWorker`. One thread calls the verbs. None waits for the device,
    except `pack_now`, `settle`, `close`, and `probe` unless paced."""

    @property
    def facts(self) -> WorkerFacts: ...

    def step(self, inputs: StepInputs) -> Flight: ...

    def settle(self) -> None:
        """Wait until nothing runs on the device any more. Raises an error if it is unusable."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Move images within adapter memory, after the steps launched so far, which find the
        images at their old places, and before later steps and the copies of later loads."""

    def clear(self, slots: Sequence[int]) -> None:
        """Let no step find an adapter in these slots any more."""

    def load(self, order: LoadOrder) -> Future[LoadResult]:
        """Bring an image to adapter memory. No step reads it until `install`."""

    def install(self, slot: int, start: int, image: AdapterImage) -> None:
        """Let later steps find an image that was loaded at `start` in a slot."""

    def pack(self, source: AdapterSource) -> Future[PackedAdapter | WeftError]:
        """Read, validate and pack an adapter. If `source` has a digest, the content must have it,
        and may come from its image file."""

    def pack_now(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> AdapterImage:
        """Pack an adapter that is in memory. It may change nothing, as at the start of its
        training. Raises AdapterInvalid."""

    def probe(self, image: AdapterImage, *, paced: bool) -> Future[ProbeResult | WeftError]:
        """Check whether the device computes an adapter as it should. `paced`: run beside steps,
        without disturbing them; otherwise the future is done when this returns."""

    def stage(self, image: AdapterImage, extent: Extent) -> Future[AdapterImage]:
        """Copy an image to an extent of the host's memory. The future gives the copy."""

    def check_sum(self, parts: Sequence[tuple[str, Summand]]) -> int:
        """How many elements the sum of these adapters takes; `parts`: each with its name. Raises
        InvalidRequest if they can't be summed."""

    def disk_stats(self) -> TierStats | None:
        """Figures of the image files; None if there are none."""

    def stuck_s(self) -> dict[str, float]:
        """For how many seconds its threads have made no progress, by what they do. Call it
        regularly, from one thread, which need not be the one of the other verbs."""
        ...

    def close(self) -> None:
        """Wait for work under way, drop waiting work, and release threads and memory."""
