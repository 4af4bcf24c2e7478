"""Forms on their way to an engine's process."""

from __future__ import annotations

import random

from weft.core.messages import Submit
from weft.core.requests import EngineRequest
from weft.core.sampling import SamplingParams, StructuredOutputs
from weft.fleet.forms import NUM_PLACES, ReceivedForms, SentForms
from weft.fleet.process import COMMANDS


def test_each_form_is_sent_once_and_arrives_with_every_request() -> None:
    sent, received, rng = SentForms(), ReceivedForms(), random.Random(0)
    forms = [StructuredOutputs(regex=f"{n} " + "x" * 60_000) for n in range(NUM_PLACES + 8)]
    sizes: list[int] = []
    for n in range(1000):
        burst = n % 100 < 50
        form = rng.choice([None, forms[n // 100]] if burst else [*forms, None])
        request = EngineRequest(str(n), [1], SamplingParams(structured_outputs=form), seed=0)
        data = COMMANDS.encode(sent.pack(request))
        sizes += [len(data)] if burst else []
        command = COMMANDS.decode(data)
        assert isinstance(command, Submit)
        assert received.unpack(command) == Submit(request)
    assert sum(size > 60_000 for size in sizes) <= 10
