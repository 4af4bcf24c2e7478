"""The worker of one device: its verbs, in the order of their calls; see `weft.worker.protocol`."""

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
from weft.models.loading import LoadedModel
from weft.schedule.extents import Extent, Move
from weft.schedule.plan import StepResult
from weft.worker.adapters import AdapterLoader
from weft.worker.execute import StepExecutor
from weft.worker.inputs import StepInputs
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


class DeviceWorker(Worker):
    """Steps and moves share a queue: a CUDA stream, or a thread that stands in for one. Loads wait
    for moves; all else that is slow has threads of its own."""

    def __init__(
        self,
        facts: WorkerFacts,
        model: LoadedModel,
        executor: StepExecutor,
        adapters: AdapterLoader,
        activity: Activity,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.pool = adapters.pool
        self._facts = facts
        self._executor = executor
        self._activity = activity
        self._on_gpu = model.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-forward")
        self._wait_moved: Callable[[], object] = lambda: None
        """Waits until the newest move, and all before it, are done; any thread."""

    @property
    def facts(self) -> WorkerFacts:
        return self._facts

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
            done.record()
            self._wait_moved = done.synchronize
        else:
            self._wait_moved = self._thread.submit(self.pool.move, moves).result

    def clear(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.pool.clear(slot)

    def load(self, order: LoadOrder) -> Future[LoadResult]:
        return self.adapters.load(order, self._wait_moved)

    def install(self, slot: int, start: int, image: AdapterImage) -> None:
        self.pool.install(slot, start, image.layout)

    def pack(self, source: AdapterSource) -> Future[PackedAdapter | WeftError]:
        return self.adapters.pack(source)

    def pack_now(
        self, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
    ) -> AdapterImage:
        return self.adapters.packer.pack_adapter(files_of(config, tensors))

    def probe(self, image: AdapterImage, *, paced: bool) -> Future[ProbeResult | WeftError]:
        return self.adapters.probe(image, paced=paced)

    def stage(self, image: AdapterImage, extent: Extent) -> Future[AdapterImage]:
        return self.adapters.stage(image, extent)

    def check_sum(self, parts: Sequence[tuple[str, Summand]]) -> int:
        return self.adapters.packer.check_sum(parts)

    def disk_stats(self) -> TierStats | None:
        return self.adapters.disk_stats()

    def stuck_s(self) -> dict[str, float]:
        return self.adapters.stuck_s()

    def close(self) -> None:
        self.adapters.close()
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
            done.record()
        return _CudaFlight(done, lambda: step_result(inputs, host))


class _CudaFlight:
    def __init__(self, done: torch.cuda.Event, make: Callable[[], StepResult]) -> None:
        self._done = done
        self._make = make

    def result(self) -> StepResult:
        self._done.synchronize()
        return self._make()
