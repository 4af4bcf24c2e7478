"""The messages between the first rank of a model and the others.

All ranks carry out the same orders, in the order in which they are sent. An order that is answered
has a call id, which the answer repeats; it may run on another thread.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from weft.checkpoint.pack import AdapterImage
from weft.core.config import EngineArgs
from weft.core.targets import ImageLayout
from weft.schedule.extents import Move
from weft.worker.gathered import Part
from weft.worker.inputs import Array, StepInputs


class RankSetup(NamedTuple):
    """All that a rank needs in order to start."""

    args: EngineArgs
    rank: int
    parent_pid: int | None
    """The process whose end kills this one. None if the thread that started this one may end
    earlier: then this process only ends when it notices that the first rank is gone."""
    folder: str
    """The folder by which the ranks join their group."""
    logs: tuple[str, bool] | None
    """The level of its log, and whether it is JSON; None: Python's default logging."""


class StepOrder(NamedTuple):
    """A step. Decodes of the same rows have most of their arrays in common, which are sent once."""

    changed: Mapping[str, object]
    """By name, the fields of its inputs that are not the same objects as in the step before."""

    @classmethod
    def after(cls, before: StepInputs | None, inputs: StepInputs) -> StepOrder:
        """The order for a step; `before` has the inputs of the one before, if there was one."""
        if before is None:
            return cls(inputs._asdict())
        each = zip(inputs._fields, inputs, before, strict=True)
        return cls({name: value for name, value, last in each if value is not last})

    def inputs(self, before: StepInputs | None) -> StepInputs:
        """The step's inputs, from those of the step before."""
        changed: Mapping[str, Any] = self.changed
        return StepInputs(**changed) if before is None else before._replace(**changed)


class MoveOrder(NamedTuple):
    moves: tuple[Move, ...]


class ClearOrder(NamedTuple):
    slots: tuple[int, ...]


class InstallOrder(NamedTuple):
    slot: int
    start: int
    layout: ImageLayout


class SettleOrder(NamedTuple):
    """Wait for all steps. Answered with why the device is unusable, or ""."""

    call: int


class DataPlace(NamedTuple):
    """Where a rank finds the data of an image."""

    offset: int | None
    """The offset of all ranks' parts in the host's memory, in bytes. None: the rank's own part
    comes as a parcel with the call id; see `weft.worker.parcels`."""


class WriteOrder(NamedTuple):
    """Copy a rank's part of an image to adapter memory. Answered with its checksum there."""

    call: int
    start: int
    num_elements: int
    """The size of one rank's part."""
    where: DataPlace


class ProbeOrder(NamedTuple):
    """Check a rank's part of an image. Answered with a ProbeResult or a WeftError."""

    call: int
    image: AdapterImage
    """Without data."""
    where: DataPlace
    paced: bool


class PartOrder(NamedTuple):
    """Write the rank's part of a weight to the file that comes as a parcel. Answered with its
    shape, or a WeftError."""

    call: int
    part: Part


class SquaresOrder(NamedTuple):
    """Compute `weft.checkpoint.base.row_squares` of the rank's part of a weight. Its A and B come
    one after the other as a parcel. Answered with a float32 array, or a WeftError."""

    call: int
    part: Part
    adapter_rank: int
    """How many rows A has."""


class CloseOrder(NamedTuple):
    pass


Order = (
    StepOrder
    | MoveOrder
    | ClearOrder
    | InstallOrder
    | SettleOrder
    | WriteOrder
    | ProbeOrder
    | PartOrder
    | SquaresOrder
    | CloseOrder
)


def packed(order: Order) -> bytes:
    """An order as bytes, for `pickle.loads`. A step has up to twenty arrays, and numpy's own way to
    pickle each takes several times as long."""
    made = io.BytesIO()
    pickler = pickle.Pickler(made, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _ARRAYS
    pickler.dump(order)
    return made.getvalue()


def _reduced(array: Array) -> tuple[Callable[..., Array], tuple[object, str, tuple[int, ...]]]:
    content = pickle.PickleBuffer(np.ascontiguousarray(array).data)
    return _array, (content, array.dtype.char, array.shape)


def _array(content: bytearray, kind: str, shape: tuple[int, ...]) -> Array:
    return np.frombuffer(content, kind).reshape(shape)


_ARRAYS: Mapping[type, Callable[[Any], Any]] = {np.ndarray: _reduced}


class StageEnded(NamedTuple):
    """A rank has ended a stage of its start; see `weft.worker.starting`."""

    stage: str


class RankAnswer(NamedTuple):
    call: int
    result: object


class StepFailed(NamedTuple):
    """A step failed on a rank."""

    message: str


class RankAlive(NamedTuple):
    """A sign of life, with what `WatchedThreads.stuck_s` said of its threads."""

    stuck_s: dict[str, float]


class RankLost(NamedTuple):
    """A rank can't go on."""

    message: str


Report = StageEnded | RankAnswer | StepFailed | RankAlive | RankLost
