"""The requests of a model's first rank to the other ranks, if there are any."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from weft.checkpoint.pack import AdapterImage
from weft.core.errors import WeftError
from weft.schedule.extents import Move
from weft.worker.inputs import StepInputs
from weft.worker.protocol import Flight, ProbeResult


class OtherRanks:
    """The verbs of `Worker` for all other ranks, which carry them out in the order of the calls.
    This class is for a model on one rank: there are no others, and its verbs do nothing.
    `weft.worker.peers.Peers` passes them on to processes."""

    num_ranks = 1
    """How many ranks there are, including the first one."""

    def step(self, inputs: StepInputs) -> None:
        """Let them begin a step. Raises RuntimeError if an earlier one failed on another rank."""

    def joined(self, flight: Flight) -> Flight:
        """The flight of a step on all ranks, given this rank's."""
        return flight

    def settle(self) -> None:
        """Wait until nothing runs on any rank. Raises EngineDead if one can't come to rest."""

    def move(self, moves: Sequence[Move]) -> None:
        """See `Worker.move`."""

    def clear(self, slots: Sequence[int]) -> None:
        """See `Worker.clear`."""

    def install(self, slot: int, start: int, image: AdapterImage) -> None:
        """See `Worker.install`."""

    def write(self, start: int, image: AdapterImage, offset: int | None) -> list[Future[int]]:
        """Copy their parts of an image to adapter memory, after all earlier orders. The futures
        give the checksums of the copies. `offset`: the image's place in the host's memory, in
        bytes; None: it is not there."""
        return []

    def probe(
        self, image: AdapterImage, offset: int | None, *, paced: bool
    ) -> list[Future[ProbeResult | WeftError]]:
        """Check their parts of an image; see `write`."""
        return []

    def stuck_s(self) -> dict[str, float]:
        """See `Worker.stuck_s`."""
        return {}

    def close(self) -> None:
        """End them."""


NO_OTHERS = OtherRanks()
"""For a model on one rank."""
