"""Steps that fail: those requests end that make them fail, and all others get their tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from tiny import ADAPTERS, BASE, ask

from weft.core.adapters import AdapterRef, AdapterSource
from weft.core.config import engine_args
from weft.core.errors import WeftError, from_wire
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.sampling import SamplingParams
from weft.fleet.direct import DirectClient
from weft.text import load_tokenizer
from weft.worker.inputs import RowState, StepInputs
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


@pytest.fixture(scope="module", params=[True, False], ids=["overlapped", "plain"])
def client(request: pytest.FixtureRequest) -> Iterator[DirectClient]:
    import asyncio

    made = DirectClient(
        engine_args(str(BASE), num_threads=1, num_blocks=512, overlap=request.param)
    )
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def refs(client: DirectClient) -> list[AdapterRef | None]:
    import asyncio

    async def hold(name: str) -> AdapterRef:
        info = await client.hold(AdapterSource(str(ADAPTERS[name])), name)
        return AdapterRef(name, 1, info.digest)

    return [None, *(asyncio.run(hold(name)) for name in ("upper", "reverse"))]


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


@pytest.mark.parametrize("where", ["device", "launch", "build"])
def test_only_those_to_blame_end(
    client: DirectClient,
    refs: list[AdapterRef | None],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Wherever the step fails: in its prompt, or at some token, alone or beside others."""
    caplog.set_level(logging.CRITICAL)
    good = good_requests(refs)
    expected = outcomes(client, good)
    if where == "build":
        build = RowState.build
        monkeypatch.setattr(RowState, "build", lambda *a: poisoned(i := build(*a)) or i)
    elif where == "launch":
        step = DeviceWorker.step
        monkeypatch.setattr(DeviceWorker, "step", lambda self, i: poisoned(i) or step(self, i))
    else:
        run = DeviceWorker._run_cpu
        monkeypatch.setattr(DeviceWorker, "_run_cpu", lambda self, i: poisoned(i) or run(self, i))
    bad = [bad_request(0, POISON_AT - 6), bad_request(1, POISON_AT + 5), bad_request(2, 50)]
    got = outcomes(client, [*good[:4], *bad, *good[4:]])
    assert {name: each for name, each in got.items() if name.startswith("good")} == expected
    assert all(got[each.request_id][2] == "error" for each in bad)
    assert len(got["bad-0"][0]) == 7, "it got the tokens before"
    error = error_of(client, bad_request(9, POISON_AT + 5))
    assert type(error) is WeftError and "RuntimeError" in error.message
    stats = client.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)


def test_an_engine_in_which_everything_fails_ends(
    client: DirectClient, refs: list[AdapterRef | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one with this engine."""

    def step(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(DeviceWorker, "step", step)
    with pytest.raises(RuntimeError, match="the device is gone"):
        outcomes(client, good_requests(refs))
