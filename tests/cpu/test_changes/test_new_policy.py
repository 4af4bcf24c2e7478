"""An eviction policy is a function and a row: what is here serves under its own name, and is a
choice of the flag."""

from __future__ import annotations

from typing import get_args

import pytest
from engines import MakeLLM
from tiny import ADAPTERS, answer, ask

from weft import SamplingParams
from weft.core.errors import ConfigError
from weft.schedule.policy import POLICIES, Candidate, Worth
from weft.terminal.options import engine_parameters

asked: list[Candidate] = []


def largest_first(candidate: Candidate) -> Worth:
    asked.append(candidate)
    return Worth(candidate.demand > 0, -candidate.size)


def test_a_policy_is_a_row(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "largest", largest_first)
    asked.clear()
    llm = make_llm(eviction_policy="largest", adapter_memory=1_700_000)
    names = list(ADAPTERS)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    outputs = llm.chat([ask("planet")] * len(names), params, names)
    assert [output.text for output in outputs] == [answer(name, "planet") for name in names]
    assert llm.stats().adapter_evictions > 0 and asked
    flag = next(p for p in engine_parameters() if p.name == "eviction_policy")
    assert get_args(get_args(flag.annotation)[0]) == ("cost", "lru", "fifo", "largest")


def test_an_unknown_policy_is_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match=r"'nonesuch'.*cost, lru, fifo") as caught:
        make_llm(eviction_policy="nonesuch")
    assert caught.value.param == "eviction_policy"
