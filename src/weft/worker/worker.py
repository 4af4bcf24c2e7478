"""The worker of one device, which carries out the verbs of `weft.worker.protocol`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from weft.checkpoint.compose import Summand
from weft.checkpoint.pack import AdapterImage
from weft.checkpoint.read import files_of
from weft.core.adapters import AdapterSource
from weft.core.errors import WeftError
from weft.core.stats import TierStats
from weft.core.targets import ImageLayout
from weft.kernels.lora import AdapterPool
from weft.kernels.staging import record
from weft.models.loading import LoadedModel
from weft.schedule.extents import Extent, Move
from weft.schedule.plan import StepResult
from weft.worker.adapters import AdapterLoader
from weft.worker.execute import StepExecutor
from weft.worker.inputs import StepInputs
from weft.worker.others import NO_OTHERS, OtherRanks
from weft.worker.protocol import (
    Flight,
    LoadOrder,
    LoadResult,
    PackedAdapter,
    ProbeResult,
    Worker,
    WorkerFacts,
)
from weft.worker.sampler import step_result, to_host
from weft.worker.selfcheck import Activity
from weft.worker.threads import wait_for

REST_S = 10.0
"""How long a device may take to come to rest when it is closed."""


class DeviceSteps:
    """The verbs of one device whose order matters; one thread calls them. See `Worker`. Steps and
    moves share a queue: a CUDA stream, or on a CPU a thread in its place."""

    def __init__(
        self, model: LoadedModel, pool: AdapterPool, executor: StepExecutor, activity: Activity
    ) -> None:
        self.model = model
        self.pool = pool
        self._executor = executor
        self._activity = activity
        self._on_gpu = model.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-forward")
        self.wait_moved: Callable[[], object] = lambda: None
        """Waits until all moves so far are done; for any thread."""

    def step(self, inputs: StepInputs) -> Flight:
        self._activity.note()
        if self._on_gpu:
            return self._launch_cuda(inputs)
        return self._thread.submit(self._run_cpu, inputs)

    def settle(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.model.device)

    def move(self, moves: Sequence[Move]) -> None:
        if self._on_gpu:
            self.pool.move(moves)
            done: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            record(done, self.pool.arena.device)
            self.wait_moved = done.synchronize
        else:
            self.wait_moved = self._thread.submit(self.pool.move, moves).result

    def clear(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._behind_steps(self.pool.clear, slot)

    def place(self, slot: int, start: int, layout: ImageLayout) -> None:
        """Let later steps find an image of this layout, at `start`, in a slot."""
        self._behind_steps(self.pool.install, slot, start, layout)

    def _behind_steps(self, change: Callable[..., None], *args: object) -> None:
        """Change a table that steps read. On a CPU it is changed behind the steps launched so far,
        which may still read it even if the first rank has their tokens already."""
        if self._on_gpu:
            change(*args)
        else:
            self._thread.submit(change, *args)

    def close(self) -> None:
        if self._on_gpu:  # no rank may leave while others need its part of a step
            device = self.model.device
            wait_for("the last step", lambda: torch.cuda.synchronize(device), REST_S)
        self._thread.shutdown()
        self._executor.close()

    def _run_cpu(self, inputs: StepInputs) -> StepResult:
        with torch.inference_mode():
            sampled = self._executor.run(inputs)
        return step_result(inputs, sampled)

    def _launch_cuda(self, inputs: StepInputs) -> Flight:
        with torch.inference_mode():
            host = to_host(self._executor.run(inputs))
            done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            record(done, self.pool.arena.device)
        return _CudaFlight(done, lambda: step_result(inputs, host))


class DeviceWorker(DeviceSteps, Worker):
    """The worker of a model's only device, or of its first rank, which passes its verbs on to the
    `others`. Slow verbs run on threads; the copies of loads wait for earlier moves."""

    def __init__(
        self,
        facts: WorkerFacts,
        model: LoadedModel,
        executor: StepExecutor,
        adapters: AdapterLoader,
        activity: Activity,
        others: OtherRanks = NO_OTHERS,
    ) -> None:
        super().__init__(model, adapters.pool, executor, activity)
        self.adapters = adapters
        self._facts = facts
        self._others = others

    @property
    def facts(self) -> WorkerFacts:
        return self._facts

    def step(self, inputs: StepInputs) -> Flight:
        self._others.step(inputs)
        return self._others.joined(super().step(inputs))

    def settle(self) -> None:
        super().settle()
        self._others.settle()

    def move(self, moves: Sequence[Move]) -> None:
        self._others.move(moves)
        super().move(moves)

    def clear(self, slots: Sequence[int]) -> None:
        self._others.clear(slots)
        super().clear(slots)

    def install(self, slot: int, start: int, image: AdapterImage) -> None:
        self._others.install(slot, start, image)
        self.place(slot, start, image.layout)

    def load(self, order: LoadOrder) -> Future[LoadResult]:
        return self.adapters.load(order, self.wait_moved)

    def pack(self, source: AdapterSource) -> Future[PackedAdapter | WeftError]:
        return self.adapters.pack(source)

    def pack_now(
        self, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
    ) -> AdapterImage:
        return self.adapters.packer.pack_adapter(files_of(config, tensors), untrained=True)

    def probe(self, image: AdapterImage, *, paced: bool) -> Future[ProbeResult | WeftError]:
        return self.adapters.probe(image, paced=paced)

    def stage(self, image: AdapterImage, extent: Extent) -> Future[AdapterImage]:
        return self.adapters.stage(image, extent)

    def check_sum(self, parts: Sequence[tuple[str, Summand]]) -> int:
        return self.adapters.packer.check_sum(parts)

    def disk_stats(self) -> TierStats | None:
        return self.adapters.disk_stats()

    def stuck_s(self) -> dict[str, float]:
        stuck_s = self.adapters.stuck_s()
        others = self._others.stuck_s().items()
        return stuck_s | {part: max(s, stuck_s.get(part, 0.0)) for part, s in others}

    def close(self) -> None:
        self.adapters.close()
        super().close()
        self._others.close()


class _CudaFlight:
    def __init__(self, done: torch.cuda.Event, make: Callable[[], StepResult]) -> None:
        self._done = done
        self._make = make

    def result(self) -> StepResult:
        self._done.synchronize()
        return self._make()
