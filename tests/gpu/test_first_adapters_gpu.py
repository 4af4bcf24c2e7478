"""Adapters that are read while a GPU is prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tiny import ADAPTERS, answer, ask, tasks

from weft import LLM, SamplingParams
from weft.core.adapters import AdapterSource
from weft.core.folders import Folder
from weft.serving.publisher import source_of
from weft.worker.reading import AdapterReader


def test_they_answer_right(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    begin, take = AdapterReader.begin, AdapterReader._take
    sources: list[AdapterSource] = []
    for path in ADAPTERS.values():
        with Folder(str(path)) as folder:
            sources.append(source_of(folder))
    taken: list[AdapterSource] = []

    def begin_with_all(self: AdapterReader, given: Iterable[AdapterSource], most: int) -> None:
        assert not list(given)
        begin(self, sources, most)

    def note(self: AdapterReader, source: AdapterSource, ahead: Any, ended: Any) -> None:
        assert ahead is not None
        taken.append(source)
        take(self, source, ahead, ended)

    monkeypatch.setattr(AdapterReader, "begin", begin_with_all)
    monkeypatch.setattr(AdapterReader, "_take", note)
    llm = make_llm(device="cuda", dtype="float32", adapter_cache_dir="none")
    assert set(taken) == set(sources)
    jobs = [(name, word) for name in ADAPTERS for word in tasks.words(3, 4)]
    outputs = llm.chat(
        [ask(word) for _, word in jobs],
        SamplingParams(max_tokens=40, temperature=0),
        [name for name, _ in jobs],
    )
    assert [o.text for o in outputs] == [answer(name, word) for name, word in jobs]
