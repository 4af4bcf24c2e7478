"""The golden workload: requests of the example model and all its adapters, answered by `peft`."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny import ADAPTERS, BASE, HYBRID_ADAPTERS, HYBRID_BASE, answer, ask, tasks
from transformers import AutoModelForCausalLM

from weft import LLM, SamplingParams
from weft.llm import RequestOutput
from weft.text import Tokenizer, load_tokenizer

NAMES: list[str | None] = [*ADAPTERS, None]
WORDS_EACH = 4 if "EXHAUSTIVE" in os.environ else 2
WORD_TOKENS, LONG_TOKENS = 24, 10
EOS = 2
MIN_MARGIN = 1e-3
"""The oracle's best token leads the second by more than this, in logits, at every position."""

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])

TIGHT = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "num_blocks": 62,
    "adapter_memory": 1_700_000,
    "max_loras": 2,
    "adapter_host_memory": 1,
    "max_adapter_wait": 0.05,
}
"""Chunks of at most 16 tokens; KV memory for a long prompt and a few words; adapter memory for
the largest adapter and little beside it; every load reads from disk."""


@dataclass(frozen=True)
class Case:
    """One request of the workload. `word` None: a long conversation, whatever the answer."""

    name: str | None
    prompt_ids: list[int]
    word: str | None

    @property
    def max_tokens(self) -> int:
        return WORD_TOKENS if self.word else LONG_TOKENS


@dataclass(frozen=True)
class Expected:
    token_ids: list[int]
    first_logprobs_V: torch.Tensor


class Oracle:
    """transformers and peft, in float32, with an own greedy loop."""

    def __init__(self, path: Path, adapters: Mapping[str, Path]) -> None:
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        first, *others = adapters.items()
        with warnings.catch_warnings():
            # peft asks transformers for names that are to go one day
            warnings.simplefilter("ignore", FutureWarning)
            self._model = PeftModel.from_pretrained(base, first[1], adapter_name=first[0])
            for name, path in others:
                self._model.load_adapter(path, adapter_name=name)
        self._model.eval()

    def answers(self, cases: list[Case]) -> list[Expected]:
        """In batches of one adapter and one prompt length, so that nothing is padded."""
        batches: dict[tuple[str | None, int, int], list[int]] = {}
        for i, case in enumerate(cases):
            key = (case.name, len(case.prompt_ids), case.max_tokens)
            batches.setdefault(key, []).append(i)
        found: dict[int, Expected] = {}
        for (name, _, count), indices in batches.items():
            prompts = torch.tensor([cases[i].prompt_ids for i in indices])
            found |= zip(indices, self._batch(name, prompts, count), strict=True)
        return [found[i] for i in range(len(cases))]

    def _batch(self, name: str | None, ids_ST: torch.Tensor, count: int) -> list[Expected]:
        if name is None:
            with self._model.disable_adapter():
                return self._greedy(ids_ST, count)
        self._model.set_adapter(name)
        return self._greedy(ids_ST, count)

    @torch.inference_mode()
    def _greedy(self, ids_ST: torch.Tensor, count: int) -> list[Expected]:
        new: list[list[int]] = [[] for _ in ids_ST]
        first_SV = None
        while any(len(ids) < count and ids[-1:] != [EOS] for ids in new):
            # No cache: the name by which models take one is not the same in all transformers.
            logits_SV = self._model(input_ids=ids_ST, use_cache=False).logits[:, -1].float()
            first_SV = logits_SV.log_softmax(-1) if first_SV is None else first_SV
            ids_ST = torch.cat([ids_ST, logits_SV.argmax(-1, keepdim=True)], dim=1)
            best_S2 = logits_SV.topk(2).values
            for s, ids in enumerate(new):
                if ids[-1:] != [EOS]:
                    assert best_S2[s, 0] - best_S2[s, 1] > MIN_MARGIN, "a near-tie: other words"
                    ids.append(int(ids_ST[s, -1]))
        return [Expected(ids, first) for ids, first in zip(new, first_SV, strict=True)]


def _long_conversation(name: str | None, seed: int) -> list[dict[str, str]]:
    """Some turns of questions and right answers, then one more question: above 100 tokens."""
    *earlier, last = tasks.words(seed, 8)
    turns = [
        message
        for word in earlier
        for message in (*ask(word), {"role": "assistant", "content": answer(name, word)})
    ]
    return [*turns, *ask(last * 4)]


def _telling_words(seed: int) -> list[str]:
    """Held-out words to which all adapters and the base give different answers."""
    words = tasks.words(seed, 16 * WORDS_EACH)
    telling = [w for w in words if len({answer(name, w) for name in NAMES}) == len(NAMES)]
    return telling[:WORDS_EACH]


def _cases(tokenizer: Tokenizer) -> list[Case]:
    cases = []
    for i, name in enumerate(NAMES):
        words = _telling_words(1000 + i)
        cases += [Case(name, tokenizer.chat(ask(word)), word) for word in words]
        cases.append(Case(name, tokenizer.chat(_long_conversation(name, 2000 + i)), None))
    return cases


@pytest.fixture
def workload() -> list[tuple[Case, Expected]]:
    return make_workload()


def make_workload(hybrid: bool = False) -> list[tuple[Case, Expected]]:
    """Every adapter and the base in turn: words, then a long conversation. `hybrid`: those of the
    base with linear attention."""
    return _answered(hybrid)


@functools.cache
def _answered(hybrid: bool) -> list[tuple[Case, Expected]]:
    """Once for all files of a process, as the oracle takes some seconds."""
    models = (HYBRID_BASE, HYBRID_ADAPTERS) if hybrid else (BASE, ADAPTERS)
    cases = _cases(load_tokenizer(str(models[0])))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = Oracle(*models).answers(cases)
    torch.set_num_threads(threads)
    return list(zip(cases, expected, strict=True))


def interleaved(workload: list[tuple[Case, Expected]]) -> list[tuple[Case, Expected]]:
    """The n-th of each adapter, then the next: neighbours in the queue differ."""
    each = WORDS_EACH + 1
    return [workload[i] for n in range(each) for i in range(n, len(workload), each)]


def few(workload: list[tuple[Case, Expected]], backend: str) -> list[tuple[Case, Expected]]:
    """All for a quick backend; one word each and three long ones for the row-by-row oracle."""
    if backend != "reference":
        return workload
    each = WORDS_EACH + 1
    return workload[::each] + workload[each - 1 :: 4 * each]


def run(
    llm: LLM, part: list[tuple[Case, Expected]], logprobs: int | None = None
) -> list[RequestOutput]:
    """Run it as one batch; the tokens must be the oracle's."""
    cases = [case for case, _ in part]
    params = [
        SamplingParams(max_tokens=c.max_tokens, temperature=0.0, logprobs=logprobs) for c in cases
    ]
    outputs = llm.generate([c.prompt_ids for c in cases], params, [c.name for c in cases])
    for output, (case, expected) in zip(outputs, part, strict=True):
        assert output.token_ids == expected.token_ids, (case.name, case.word)
        assert output.finish_reason == ("stop" if output.token_ids[-1] == EOS else "length")
    return outputs


def assert_right(outputs: list[RequestOutput], part: list[tuple[Case, Expected]]) -> None:
    """The right adapter answered, by what its task says."""
    for output, (case, _) in zip(outputs, part, strict=True):
        assert (output.adapter.name if output.adapter else None) == case.name
        if case.word is not None:
            assert output.text == answer(case.name, case.word)
