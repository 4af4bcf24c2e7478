"""Requests on their way to an engine's process."""

from __future__ import annotations

import random

from weft.core.messages import Submit, SubmitAgain
from weft.core.requests import EngineRequest
from weft.core.sampling import SamplingParams, StructuredOutputs
from weft.fleet.sent_requests import NUM_PLACES, ReceivedRequests, SentRequests
from weft.fleet.wire import COMMANDS


def test_each_form_is_sent_once_and_arrives_with_every_request() -> None:
    sent, received, rng = SentRequests(), ReceivedRequests(), random.Random(0)
    forms = [StructuredOutputs(regex=f"{n} " + "x" * 60_000) for n in range(NUM_PLACES + 8)]
    sizes: list[int] = []
    for n in range(1000):
        burst = n % 100 < 50
        form = rng.choice([None, forms[n // 100]] if burst else [*forms, None])
        request = EngineRequest(str(n), [1], SamplingParams(structured_outputs=form), seed=0)
        data = COMMANDS.encode(sent.pack(request))
        sizes += [len(data)] if burst else []
        command = COMMANDS.decode(data)
        assert isinstance(command, Submit | SubmitAgain)
        assert received.unpack(command) == Submit(request)
    assert sum(size > 60_000 for size in sizes) <= 10


def test_choices_and_prompts_share_all_that_they_have_in_common() -> None:
    sent, received = SentRequests(), ReceivedRequests()
    params = SamplingParams(allowed_token_ids=tuple(range(10_000)), max_tokens=3)
    prompts = [list(range(20_000)), [7, 8]]
    requests = [
        EngineRequest(f"{n}-{i}", ids, params, seed=i, cache_salt="s")
        for n, ids in enumerate(prompts)
        for i in range(64)
    ]
    requests.insert(70, EngineRequest("other", [1], SamplingParams(), seed=3, tenant="t"))
    arrived, size = [], 0
    for request in requests:
        data = COMMANDS.encode(sent.pack(request))
        size += len(data)
        command = COMMANDS.decode(data)
        assert isinstance(command, Submit | SubmitAgain)
        arrived.append(received.unpack(command).request)
    assert arrived == requests and size < 250_000
    assert (
        arrived[0].prompt_ids is arrived[63].prompt_ids and arrived[0].params is arrived[64].params
    )
