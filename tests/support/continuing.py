"""Requests that one engine begins and another one goes on with."""

from __future__ import annotations

from dataclasses import replace

from engines import MakeLLM
from tiny import ADAPTERS, BASE, ask

from weft import LLM, SamplingParams
from weft.core.messages import Tokens
from weft.core.requests import EngineRequest, TokenEvent
from weft.text import load_tokenizer


def run(llm: LLM, requests: list[EngineRequest]) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    for request in requests:
        assert llm._client.engine.submit(request) is None
    while not all(found and found[-1].finish_reason for found in events.values()):
        for report in llm._client.engine.step():
            for event in report if isinstance(report, Tokens) else ():
                events[event.request_id].append(event)
    llm._client.engine.scheduler.check()
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def assert_same_bits_at_any_cut(
    make_llm: MakeLLM, length: int = 6, word: str = "hello", **options: object
) -> None:
    """With --deterministic, a request alone has the same log-probabilities, to the bit, as one that
    is cut anywhere and goes on in another engine beside others, its prompt read in chunks."""
    adapters = {"a": ADAPTERS["numeronym"]}
    first = make_llm(adapters=adapters, deterministic=True, **options)
    few = {"max_num_batched_tokens": 24, "max_num_seqs": 12, "enable_prefix_caching": False}
    second = make_llm(adapters=adapters, deterministic=True, **few, **options)
    params = SamplingParams(
        temperature=1.0, ignore_eos=True, max_tokens=length, logprobs=5, prompt_logprobs=2
    )
    prompt = load_tokenizer(str(BASE)).chat(ask(word))
    for adapter in (None, "a"):
        refs = [llm._registry.resolve(adapter).ref if adapter else None for llm in (first, second)]
        request = EngineRequest("whole", prompt, params, refs[0], seed=7)
        (whole,) = run(first, [request]).values()
        wanted, tokens = _bits(whole), tokens_of(whole)
        rests = [
            replace(request, request_id=str(cut), adapter=refs[1], output_ids=tokens[:cut])
            for cut in range(length)
        ]
        found = run(second, rests)
        for cut, events in enumerate(found.values()):
            assert _bits(events) == wanted[cut:], cut
        assert found["0"][0].prompt_logprobs == whole[0].prompt_logprobs


def _bits(events: list[TokenEvent]) -> list[tuple[int, float, object]]:
    return [
        (token, each.logprob, each.top)
        for event in events
        for token, each in zip(event.token_ids, event.logprobs or (), strict=True)
    ]
