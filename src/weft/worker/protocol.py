"""What drives a device: a few verbs, carried out in the order of their calls.

    flight = worker.step(inputs)    returns at once
    result = flight.result()        waits for the tokens

The engine knows workers by this protocol alone. Verbs take plain records and give small results,
so that what stands behind the protocol may as well hand each verb on to several devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.schedule.extents import Move
from weft.schedule.plan import StepResult
from weft.schedule.slots import Moved
from weft.worker.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker has, from its start to its end."""

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    max_model_len: int
    num_blocks: int
    """Blocks of the KV cache."""
    num_slots: int
    """The most adapters that may be on the device at a time."""
    adapter_elements: int
    """The size of adapter memory."""
    element_bytes: int
    """The size of one element of adapter memory."""


class Flight(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step's tokens. Raises what the forward pass raised."""
        ...


class Worker(Protocol):
    """See `weft.worker.worker.DeviceWorker`. The verbs are for one thread."""

    @property
    def facts(self) -> WorkerFacts: ...

    def step(self, inputs: StepInputs) -> Flight:
        """Launch a step."""
        ...

    def move(self, moves: Sequence[Move]) -> Moved:
        """Move images within adapter memory, after the steps launched so far, which find the
        images at their old places, and before later steps. The result stands for all moves that
        were ordered until now, so that no load overtakes another load's moves."""
        ...

    def close(self) -> None:
        """Wait for what is under way and let go of threads and memory."""
        ...
