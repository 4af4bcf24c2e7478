"""The worker of one device: its verbs, in the order of their calls; see `weft.worker.protocol`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from weft.kernels.lora import AdapterPool
from weft.schedule.extents import Move
from weft.schedule.plan import StepResult
from weft.schedule.slots import Moved
from weft.worker.execute import StepExecutor
from weft.worker.inputs import StepInputs
from weft.worker.loader import LoadedModel
from weft.worker.outcome import step_result, to_host
from weft.worker.packing import Packer
from weft.worker.protocol import Flight, WorkerFacts
from weft.worker.selfcheck import Activity, SelfCheck


class DeviceWorker:
    """Steps and moves share a queue: a CUDA stream, or a thread that stands in for one."""

    def __init__(
        self,
        facts: WorkerFacts,
        model: LoadedModel,
        executor: StepExecutor,
        pool: AdapterPool,
        packer: Packer,
        self_check: SelfCheck | None,
        activity: Activity,
    ) -> None:
        """self_check None: adapters are not checked."""
        self.facts = facts
        self.model = model
        self.pool = pool
        self.packer = packer
        self.self_check = self_check
        self._executor = executor
        self._activity = activity
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-forward")
        self._moved: Moved = _Nothing()

    def compile(self) -> None:
        """Compile what steps need, if they are to be captured. The device has little to do."""
        with torch.inference_mode():
            self._executor.compile()

    def capture(self) -> bool:
        """Capture steps, after `compile`, and tell whether there are any to capture. No other
        thread may use the device meanwhile."""
        with torch.inference_mode():
            return self._executor.capture()

    def step(self, inputs: StepInputs) -> Flight:
        self._activity.note()
        if self.model.device.type == "cuda":
            return self._launch_cuda(inputs)
        return self._thread.submit(self._run_cpu, inputs)

    def move(self, moves: Sequence[Move]) -> Moved:
        if moves and self.model.device.type == "cuda":
            self.pool.move(moves)
            self._moved = _CudaMoved()
        elif moves:
            self._moved = _CpuMoved(self._thread.submit(self.pool.move, moves))
        return self._moved

    def close(self) -> None:
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


class _Nothing:
    def wait(self) -> None:
        """Nothing was moved yet."""


class _CpuMoved:
    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()


class _CudaMoved:
    """All that is on the current stream by now."""

    def __init__(self) -> None:
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._done.record()

    def wait(self) -> None:
        self._done.synchronize()
