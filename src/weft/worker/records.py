"""The messages between the first rank of a model and the others.

All ranks carry out the same verbs in one order, which is that of the records here. What takes
longer goes on beside, and has a number by which its answer is known.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from weft.checkpoint.pack import AdapterImage
from weft.core.config import EngineArgs
from weft.core.targets import ImageLayout
from weft.schedule.extents import Move
from weft.worker.inputs import Array, StepInputs


class RankSetup(NamedTuple):
    """What a rank has to know to start."""

    args: EngineArgs
    rank: int
    parent_pid: int | None
    """The process whose end kills this one, or None if the thread that started it may end first.
    Then this process ends by itself when it sees that the first rank is gone."""
    folder: str
    """Where the ranks meet."""
    logs: tuple[str, bool] | None
    """The level of its log, and whether it is JSON; None: as Python has it."""


class StepOrder(NamedTuple):
    """A step. Decodes of the same rows have most of their arrays in common, which are sent once."""

    changed: Mapping[str, object]
    """The fields of its inputs that are other objects than in the step before, by name."""

    @classmethod
    def after(cls, before: StepInputs | None, inputs: StepInputs) -> StepOrder:
        """The order for a step; `before` has the inputs of the one before, if there was one."""
        if before is None:
            return cls({name: getattr(inputs, name) for name in _FIELDS})
        return cls(
            {
                name: value
                for name in _FIELDS
                if (value := getattr(inputs, name)) is not getattr(before, name)
            }
        )

    def inputs(self, before: StepInputs | None) -> StepInputs:
        """The step's inputs, from those of the step before."""
        changed: Mapping[str, Any] = self.changed
        return StepInputs(**changed) if before is None else replace(before, **changed)


_FIELDS = tuple(field.name for field in fields(StepInputs))


class MoveOrder(NamedTuple):
    moves: tuple[Move, ...]


class ClearOrder(NamedTuple):
    slots: tuple[int, ...]


class InstallOrder(NamedTuple):
    slot: int
    start: int
    layout: ImageLayout


class SettleOrder(NamedTuple):
    """Wait for all steps, and forget which of them failed. Answered."""

    call: int


class DataPlace(NamedTuple):
    """Where the data of an image are that a rank is to read."""

    offset: int | None
    """Of all ranks' parts in the host's memory, in bytes; None: its own part comes as a parcel with
    the number of the call."""


class WriteOrder(NamedTuple):
    """Copy a rank's part of an image to adapter memory. Answered with its checksum there."""

    call: int
    start: int
    num_elements: int
    """Of one rank's part."""
    where: DataPlace


class ProbeOrder(NamedTuple):
    """Check a rank's part of an image. Answered with a ProbeResult or a WeftError."""

    call: int
    image: AdapterImage
    """Without data."""
    where: DataPlace
    paced: bool


class ShareOrder(NamedTuple):
    """Answered with the rank's part of a weight: its bytes, and its shape."""

    call: int
    kind: str
    """matrix, bias or norm."""
    name: str


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
    | ShareOrder
    | CloseOrder
)


def packed(order: Order) -> bytes:
    """An order as bytes, for `pickle.loads`. A step has up to twenty arrays, for each of which
    numpy's own way takes several times as long."""
    made = io.BytesIO()
    pickler = pickle.Pickler(made, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _ARRAYS
    pickler.dump(order)
    return made.getvalue()


def _reduced(array: Array) -> tuple[Callable[..., Array], tuple[bytearray, str, tuple[int, ...]]]:
    return _array, (bytearray(array.tobytes()), array.dtype.char, array.shape)


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
