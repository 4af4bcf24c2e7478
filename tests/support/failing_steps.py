"""Steps that fail, on whatever device: those requests end that make them fail, and all others get
the tokens that they get without them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tiny import ADAPTERS, BASE, ask

from weft.core.adapters import AdapterRef, AdapterSource
from weft.core.errors import WeftError, from_wire
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.sampling import SamplingParams
from weft.fleet.direct import DirectClient
from weft.schedule.plan import StepResult
from weft.text import load_tokenizer
from weft.worker.inputs import RowState, StepInputs
from weft.worker.protocol import Flight
from weft.worker.worker import DeviceWorker

TOKENIZER = load_tokenizer(str(BASE))
POISON_AT = 60
"""The position that no good request reaches."""
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.2, ignore_eos=True, frequency_penalty=0.5),
    SamplingParams(max_tokens=16, temperature=0.7, ignore_eos=True, logprobs=2, top_p=0.9),
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=1),
]


def hold(client: DirectClient) -> list[AdapterRef | None]:
    """The base, and adapters that the engine holds from now on."""

    async def hold_one(name: str) -> AdapterRef:
        info = await client.hold(AdapterSource(str(ADAPTERS[name])), name)
        return AdapterRef(name, 1, info.digest)

    return [None, *(asyncio.run(hold_one(name)) for name in ("upper", "reverse"))]


def good_requests(refs: list[AdapterRef | None]) -> list[EngineRequest]:
    return [
        EngineRequest(
            f"good-{i}",
            TOKENIZER.chat(ask("window"[: 1 + i % 6])),
            PARAMS[i % len(PARAMS)],
            refs[i % len(refs)],
            seed=i,
        )
        for i in range(9)
    ]


def bad_request(number: int, num_prompt: int) -> EngineRequest:
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    return EngineRequest(f"bad-{number}", [7 + number] * num_prompt, params, None, seed=0)


Outcome = tuple[list[int], int, str | None]


def outcomes(client: DirectClient, requests: list[EngineRequest]) -> dict[str, Outcome]:
    """Tokens, the number of log-probabilities and the reason of the end, by request."""
    events: dict[str, list[TokenEvent]] = {each.request_id: [] for each in requests}
    for event in client.run(requests):
        events[event.request_id].append(event)
    client.engine.check()
    return {
        request_id: (
            [token for event in its for token in event.token_ids],
            sum(len(event.logprobs or ()) for event in its),
            its[-1].finish_reason,
        )
        for request_id, its in events.items()
    }


def error_of(client: DirectClient, request: EngineRequest) -> WeftError:
    *_, last = client.run([request])
    assert last.error is not None
    return from_wire(last.error)


def poisoned(inputs: StepInputs) -> None:
    if int(inputs.positions_T.max()) >= POISON_AT:
        raise RuntimeError("poison")


class _Spoilt:
    """A step that has run on the device, without a result."""

    def __init__(self, flight: Flight, inputs: StepInputs) -> None:
        self._flight, self._inputs = flight, inputs

    def result(self) -> StepResult:
        found = self._flight.result()
        poisoned(self._inputs)
        return found


def spoil_build(patch: pytest.MonkeyPatch) -> None:
    """What the host builds for a step fails."""
    build = RowState.build
    patch.setattr(RowState, "build", lambda *args: poisoned(made := build(*args)) or made)


def spoil_launch(patch: pytest.MonkeyPatch) -> None:
    """Nothing of the step reaches the device."""
    step = DeviceWorker.step
    patch.setattr(DeviceWorker, "step", lambda self, inputs: poisoned(inputs) or step(self, inputs))


def spoil_result(patch: pytest.MonkeyPatch) -> None:
    """The device has computed all of it, and another step after it, before anybody knows."""
    step = DeviceWorker.step
    patch.setattr(DeviceWorker, "step", lambda self, inputs: _Spoilt(step(self, inputs), inputs))


SPOILERS: list[Callable[[pytest.MonkeyPatch], None]] = [spoil_build, spoil_launch, spoil_result]


def check_only_those_to_blame_end(
    client: DirectClient,
    refs: list[AdapterRef | None],
    spoil: Callable[[pytest.MonkeyPatch], None],
    patch: pytest.MonkeyPatch,
) -> None:
    """Only bad requests end, whatever of the step fails: in a prompt or later, alone or not."""
    good = good_requests(refs)
    expected = outcomes(client, good)
    spoil(patch)
    bad = [bad_request(0, POISON_AT - 6), bad_request(1, POISON_AT + 5), bad_request(2, 50)]
    got = outcomes(client, [*good[:4], *bad, *good[4:]])
    assert {name: each for name, each in got.items() if name.startswith("good")} == expected
    assert all(got[each.request_id][2] == "error" for each in bad)
    assert len(got["bad-0"][0]) == 7, "it got the tokens before"
    error = error_of(client, bad_request(9, POISON_AT + 5))
    assert type(error) is WeftError and "RuntimeError" in error.message
    stats = client.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
