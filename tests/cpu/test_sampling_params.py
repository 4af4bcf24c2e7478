"""What requests can ask of the choice of tokens, over the example model: against transformers,
against own rules in plain Python, in both loops, with chunks and preemptions."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_tokenizers
from engines import MakeLLM
from peft import PeftModel
from tiny import ADAPTERS, BASE, ask
from transformers import AutoModelForCausalLM

from weft import LLM, SamplingParams
from weft.core.adapters import WeightedAdapter
from weft.core.errors import InvalidRequest
from weft.core.requests import TokenEvent
from weft.core.sampling import StructuredOutputs
from weft.engine.loop import QueueTimes
from weft.schedule.plan import Admitted
from weft.text import OutputStream, StopStrings, load_tokenizer
from weft.text.tokenizer import bad_token_ids, spellings

TOKENIZER = load_tokenizer(str(BASE))
EOS = 2
VOCAB = 262
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
LONG = replace(GREEDY, ignore_eos=True, max_tokens=40)
WILD = SamplingParams(max_tokens=20, temperature=3.0, ignore_eos=True)
WORDS = ["hello", "world", "spring", "tiny"]
HEADED = "numeronym"
"""An adapter that changes the head too."""
MIN_MARGIN = 1e-4
"""Of logits, between the oracle's choice and the second best: what rounding can't turn round."""
TIGHT = {"num_blocks": 32, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8}
"""Chunks of at most 16 tokens, and KV memory for a few requests: preemptions."""

LOOPS = pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["plain", "overlap"]
)


@pytest.fixture(scope="module")
def llm(make_module_llm: MakeLLM) -> LLM:
    return make_module_llm()


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def prompt_of(word: str) -> list[int]:
    return TOKENIZER.chat(ask(word))


class Oracle:
    """transformers and peft in float32: logits of whole sequences, rules in plain Python."""

    def __init__(self) -> None:
        base, self._base = (
            AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval() for _ in range(2)
        )
        with warnings.catch_warnings():
            # peft asks transformers for names that are to go one day
            warnings.simplefilter("ignore", FutureWarning)
            self._model = PeftModel.from_pretrained(base, ADAPTERS[HEADED]).eval()

    @torch.inference_mode()
    def logits(self, ids: list[int], adapter: str | None = None) -> torch.Tensor:
        """(T, V)."""
        assert adapter in (None, HEADED)
        model = self._base if adapter is None else self._model
        return model(torch.tensor([ids])).logits[0].float()

    def greedy(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Each token from all those before it, anew."""
        output: list[int] = []
        while len(output) < (params.max_tokens or 0):
            scores = shaped(self.logits(prompt + output)[-1].tolist(), prompt, output, params)
            best, second = sorted(range(VOCAB), key=lambda t: -scores[t])[:2]
            assert scores[best] - scores[second] > MIN_MARGIN, "nearly a tie: a bad example"
            output.append(best)
            if best == EOS and not params.ignore_eos:
                break
        return output


def shaped(
    scores: list[float], prompt: list[int], output: list[int], params: SamplingParams
) -> list[float]:
    """The rules, token by token."""
    times = Counter(output)
    scores = [score + params.logit_bias.get(t, 0.0) for t, score in enumerate(scores)]
    for t in {*prompt, *output}:
        penalty = params.repetition_penalty
        scores[t] = scores[t] / penalty if scores[t] > 0 else scores[t] * penalty
    for t, count in times.items():
        scores[t] -= params.frequency_penalty * count + params.presence_penalty
    for t in range(VOCAB):
        early = len(output) < params.min_tokens and t in (EOS, *params.stop_token_ids)
        if early or (params.allowed_token_ids and t not in params.allowed_token_ids):
            scores[t] = -float("inf")
    return scores


SHAPING = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 1.9},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -0.5, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.8, "frequency_penalty": 0.6},
    {"logit_bias": {107: 6.0, 110: -100.0, 69: 3.5}, "presence_penalty": 2.0},
    {"min_tokens": 12, "frequency_penalty": 1.0, "ignore_eos": False},
    {"allowed_token_ids": (EOS, *range(100, 130)), "frequency_penalty": 1.5},
]


# -- penalties, bias and masks -----------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.exhaustive), TIGHT], ids=["roomy", "tight"]
)
def test_greedy_outputs_are_those_of_the_rules(
    make_llm: MakeLLM, oracle: Oracle, overlap: bool, options: dict[str, int]
) -> None:
    """All kinds side by side with plain requests; the counts survive preemptions."""
    llm = make_llm(overlap=overlap, adapters={}, **options)
    params = [replace(LONG, **{**each, "max_tokens": 16}) for each in SHAPING] + [GREEDY] * 2
    prompts = [prompt_of(WORDS[i % 4]) for i in range(len(params))]
    outputs = llm.generate(prompts, params)
    for output, prompt, each in zip(outputs, prompts, params, strict=True):
        assert output.token_ids == expected(oracle, prompt, each), each
    assert (llm.stats().preemptions > 0) == bool(options)


_expected: dict[str, list[int]] = {}


def expected(oracle: Oracle, prompt: list[int], params: SamplingParams) -> list[int]:
    key = repr((prompt, params))
    if key not in _expected:
        _expected[key] = oracle.greedy(prompt, params)
    return _expected[key]


FEATURES: list[dict[str, Any]] = [
    *({k: v for k, v in each.items() if k != "ignore_eos"} for each in SHAPING),
    {"min_p": 0.05},
    {"min_p": 0.3, "top_k": 20, "top_p": 0.9},
    {"bad_words": ("e", "th", "oo")},
    {"top_p": 0.7, "repetition_penalty": 1.4, "min_p": 0.01},
    {"structured_outputs": StructuredOutputs(regex="([a-z]{2}-){3,9}"), "presence_penalty": 1.0},
    {"temperature": 0.0, "bad_words": ("h", "he")},
    {},
]


_alone: list[list[int]] = []


@LOOPS
def test_a_seeded_request_does_not_depend_on_the_batch(
    make_llm: MakeLLM, llm: LLM, overlap: bool
) -> None:
    """Of every kind: alone, then all together with others, tightly, with preemptions. Alone they
    run once, overlapped: the plain loop must give the same tokens."""
    adapters = {name: ADAPTERS[name] for name in ("upper", "sort")}
    crowd = make_llm(adapters=adapters, overlap=overlap, **TIGHT)
    wild = replace(WILD, max_tokens=13)
    params = [replace(wild, **{**each, "seed": 7 + i}) for i, each in enumerate(FEATURES)]
    names = [[None, "upper", "sort"][i % 3] for i in range(len(params))]
    prompts = [prompt_of(WORDS[i % 4]) for i in range(len(params))]
    if not _alone:
        _alone.extend(
            llm.generate([p], s, [n])[0].token_ids
            for p, s, n in zip(prompts, params, names, strict=True)
        )
    others = [replace(wild, **each) for each in FEATURES[::2]]
    together = crowd.generate(
        prompts + prompts[: len(others)], params + others, names + [None] * len(others)
    )
    assert [o.token_ids for o in together[: len(params)]] == _alone
    assert crowd.stats().preemptions > 0


def test_logprobs_are_those_of_the_raw_logits(llm: LLM, oracle: Oracle) -> None:
    prompt = prompt_of("hello")
    params = replace(
        LONG,
        max_tokens=5,
        logprobs=3,
        logit_bias={120: 100.0},
        frequency_penalty=2.0,
        allowed_token_ids=(120, 121),
    )
    (output,) = llm.generate(prompt, params)
    assert set(output.token_ids) <= {120, 121}
    assert output.logprobs is not None
    for i, entry in enumerate(output.logprobs):
        raw_V = oracle.logits(prompt + output.token_ids[:i])[-1].log_softmax(-1)
        assert entry.logprob == pytest.approx(float(raw_V[output.token_ids[i]]), abs=1e-4)
        assert [t for t, _ in entry.top] == raw_V.topk(3).indices.tolist()


def test_min_p_one_is_greedy(llm: LLM) -> None:
    prompts = [prompt_of(word) for word in WORDS]
    greedy = [o.token_ids for o in llm.generate(prompts, GREEDY)]
    params = replace(GREEDY, temperature=5.0, min_p=1.0)
    assert [o.token_ids for o in llm.generate(prompts, params)] == greedy


def test_min_tokens(llm: LLM) -> None:
    """Neither EOS nor stop tokens nor stop strings end the output before."""
    prompt = prompt_of("hello")
    plain, dash = llm.generate(prompt, GREEDY)[0], llm.tokenizer.encode("?")[-1]
    assert plain.token_ids[-2:] == [dash, EOS] and len(plain.token_ids) == 7
    for count in (1, 7, 9, 24):
        params = replace(GREEDY, min_tokens=count, stop_token_ids=(dash,))
        (output,) = llm.generate(prompt, params)
        assert {EOS, dash}.isdisjoint(output.token_ids[:count])
        assert len(output.token_ids) > count or output.finish_reason == "length"
    stops = replace(GREEDY, min_tokens=4, stop=("ell", "lo", "o"), max_tokens=8)
    (output,) = llm.generate(prompt, stops)
    assert (output.text, output.stop_reason) == ("hel", "lo")


@pytest.mark.parametrize("pieces", [["ab", "ab", "c"], ["aba", "b", "c"], ["ababc"]])
def test_a_stop_string_may_begin_where_none_may_end(pieces: list[str]) -> None:
    stops = StopStrings(["ab", "babc"])
    early = "".join(stops.feed(piece, may_end=False) for piece in pieces[:-1])
    text = early + stops.feed(pieces[-1])
    assert (text, stops.matched) == (("a", "babc") if len(pieces) > 1 else ("", "ab"))


def test_early_tokens_are_counted_across_events(llm: LLM) -> None:
    params = replace(GREEDY, min_tokens=3, stop=("h", "l"))
    stream = OutputStream(llm.tokenizer, params)
    ids = llm.tokenizer.encode("hello", add_special_tokens=False)[-5:]
    deltas = [stream.feed(TokenEvent("r", part)) for part in (ids[:2], ids[2:])]
    assert "".join(d.text for d in deltas) == "hel"
    assert [d.stop_reason for d in deltas] == [None, "l"]
    assert deltas[1].token_ids == ids[2:4]


def test_bad_words(llm: LLM) -> None:
    prompt = prompt_of("hello")
    for words in (("l",), ("lo",), ("ll", "lL"), ("hello",), (" ", "h", "H", "e")):
        (output,) = llm.generate(prompt, replace(GREEDY, bad_words=words))
        assert not any(word in output.text for word in words), output.text
        (again,) = llm.generate(prompt, replace(GREEDY, temperature=0.8, bad_words=words))
        assert not any(word in again.text for word in words), again.text


def test_bad_words_do_not_bind_the_prompt(llm: LLM) -> None:
    """The prompt's tail does not count as the beginning of one."""
    prompt = [*prompt_of("hello"), *llm.tokenizer.encode("hel", add_special_tokens=False)[-3:]]
    (plain,) = llm.generate(prompt, GREEDY)
    (bound,) = llm.generate(prompt, replace(GREEDY, bad_words=("ell",)))
    assert plain.text.startswith("l")
    assert bound.token_ids == plain.token_ids


def test_bad_token_ids() -> None:
    tokenizer = toy_tokenizers.byte_level()

    def spelled(*words: str) -> set[str]:
        encoded = [tokenizer.encode(text, False) for text in spellings(words)]
        ids = bad_token_ids(words, encoded)
        assert all(ids) and len(set(ids)) == len(ids)
        return {tokenizer.decode(each) for each in ids}

    assert bad_token_ids([], []) == ()
    assert spelled("x") == {"x"}, "what ends like a shorter one needs no entry of its own"
    assert spelled("  tx") == {"tx", " tx"}, "a token of its own after a space"
    assert spelled("\n") == {"\n"}
    assert spelled("日本", "é") == {"日本", "é"}
    assert spelled("the", "he") == {"the", "he"}, "the first as th-e, so not the second's letters"
    with pytest.raises(InvalidRequest) as caught:
        bad_token_ids(["x"], [[], [5]])
    assert caught.value.param == "bad_words"


def test_numbers_of_numpy_and_torch_mean_what_they_are() -> None:
    options: dict[str, Any] = {
        "max_tokens": np.int64(9),
        "temperature": np.float32(0.5),
        "top_k": torch.tensor(3),
        "seed": np.uint8(4),
        "logit_bias": {np.int32(5): np.float16(-1)},
        "stop_token_ids": np.array([6, 7]),
        "allowed_token_ids": np.int64(8),
        "min_tokens": np.int64(1),
    }
    params = SamplingParams(**options)
    assert params == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=3,
        seed=4,
        logit_bias={5: -1.0},
        stop_token_ids=(6, 7),
        allowed_token_ids=(8,),
        min_tokens=1,
    )
    kinds = {type(getattr(params, name)) for name in options}
    assert kinds == {int, float, dict, tuple}, "so they can be sent to an engine's process"
    assert WeightedAdapter("x", np.float32(0.5)) == WeightedAdapter("x", 0.5)


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": (1, VOCAB)}),
        ("stop_token_ids", {"stop_token_ids": (VOCAB,)}),
        ("bad_words", {"allowed_token_ids": (110,), "bad_words": ("h",)}),
        ("min_tokens", {"allowed_token_ids": (EOS,), "min_tokens": 1}),
        ("structured_outputs", {"structured_outputs": StructuredOutputs(regex="[0-9")}),
        ("structured_outputs", {"structured_outputs": {"regex": "[0-9]"}}),
        ("temperature", {"temperature": 10**400}),
        ("temperature", {"temperature": np.float32("nan")}),
        ("max_tokens", {"max_tokens": np.bool_(True)}),
        ("max_tokens", {"max_tokens": np.array([3, 4])}),
        ("logit_bias", {"logit_bias": [5]}),
        ("stop", {"stop": 5.5}),
        ("stop_token_ids", {"stop_token_ids": np.array([1.5])}),
        ("stop_token_ids", {"stop_token_ids": b"abc"}),
        ("allowed_token_ids", {"allowed_token_ids": bytearray(b"abc")}),
    ],
)
def test_what_is_refused(llm: LLM, param: str, options: dict[str, Any]) -> None:
    """It names the field, and others go on."""
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompt_of("hello"), replace(GREEDY, **options))
    assert caught.value.param == param
    assert llm.generate(prompt_of("hello"), GREEDY)[0].text == "hello?"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json", {"type": "object"}),
        ("structural_tag", {"format": {}}),
        ("regex", b"a"),
        ("grammar", 5),
        ("choice", ["a", 5]),
        ("choice", [None]),
    ],
)
def test_a_form_that_is_no_text_is_refused(name: str, value: Any) -> None:
    form: dict[str, Any] = {name: value}
    with pytest.raises(InvalidRequest, match="must be text") as caught:
        StructuredOutputs(**form)
    assert caught.value.param == f"structured_outputs.{name}"


def test_a_choice_may_be_one_text_or_several() -> None:
    one: Any = "yes"
    assert StructuredOutputs(choice=one) == StructuredOutputs(choice=("yes",))


HUGE = 10**5000
"""Python refuses to write it as digits."""


@pytest.mark.parametrize("param", ["max_tokens", "min_tokens", "top_k", "temperature", "seed"])
def test_a_number_of_too_many_digits(param: str) -> None:
    for given in (HUGE, -HUGE, [HUGE], {1: HUGE}):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{param: given})
        assert caught.value.param == param and caught.value.message.startswith(param)
        assert len(caught.value.message) < 300


@pytest.mark.parametrize("param", ["logit_bias", "stop_token_ids", "allowed_token_ids", "prompt"])
def test_a_token_id_of_too_many_digits(llm: LLM, param: str) -> None:
    ids: dict[str, Any] = {"logit_bias": {HUGE: 1.0}, "prompt": [HUGE]}
    given = ids.pop(param, [HUGE])
    with pytest.raises(InvalidRequest) as caught:
        if param == "prompt":
            llm.generate(given)
        else:
            SamplingParams(**{param: given})
    assert caught.value.param == param


# -- log-probabilities of prompts --------------------------------------------------------------


@LOOPS
def test_prompt_logprobs(make_llm: MakeLLM, oracle: Oracle, overlap: bool) -> None:
    """In chunks of 16 tokens, of base and adapter, among others, and twice in a row."""
    llm = make_llm(
        adapters={HEADED: ADAPTERS[HEADED]}, overlap=overlap, max_num_batched_tokens=16,
        max_num_seqs=8, block_size=4,
    )  # fmt: skip
    prompts = [prompt_of(word) for word in ["x" * 40, "hello", "y" * 23, "spring"]]
    asked = [replace(GREEDY, max_tokens=3, prompt_logprobs=n) for n in (2, 0, None, 5)]
    for _ in range(2):
        outputs = llm.generate(prompts, asked, [HEADED, None, None, HEADED])
        assert outputs[2].prompt_logprobs is None
        for i, name in ((0, HEADED), (1, None), (3, HEADED)):
            check_prompt_logprobs(
                outputs[i].prompt_logprobs,
                oracle.logits(prompts[i], name).log_softmax(-1),
                prompts[i],
                asked[i].prompt_logprobs or 0,
            )
            assert outputs[i].num_cached_tokens == 0
    assert outputs[2].num_cached_tokens > 0


def check_prompt_logprobs(
    got: list[Any] | None, want_TV: torch.Tensor, prompt: list[int], num: int
) -> None:
    assert got is not None and len(got) == len(prompt) and got[0] is None
    for t, entry in enumerate(got[1:]):
        target = prompt[t + 1]
        assert entry.logprob == pytest.approx(float(want_TV[t, target]), abs=1e-4)
        assert len(entry.top) == num
        values, ids = want_TV[t].topk(num)
        torch.testing.assert_close([v for _, v in entry.top], values.tolist(), atol=1e-4, rtol=0)
        for (token, _), want in zip(entry.top, ids.tolist(), strict=True):
            assert want_TV[t, token] == pytest.approx(float(want_TV[t, want]), abs=1e-4)
        better = int((want_TV[t] > want_TV[t, target] + 1e-4).sum())
        worse = int((want_TV[t] < want_TV[t, target] - 1e-4).sum())
        assert better < entry.rank <= VOCAB - worse


def test_prompt_logprobs_of_one_token(llm: LLM) -> None:
    (output,) = llm.generate([7], replace(GREEDY, prompt_logprobs=2))
    assert output.prompt_logprobs == [None]


def test_prompt_logprobs_in_more_than_a_slice(
    make_llm: MakeLLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.worker.execute.PROMPT_ROWS", 7)
    llm = make_llm(adapters={HEADED: ADAPTERS[HEADED]})
    prompts = [prompt_of(word) for word in ["hello", "x" * 30, "world"]]
    outputs = llm.generate(prompts, replace(GREEDY, prompt_logprobs=1), [HEADED, None, HEADED])
    for output, name in zip(outputs, [HEADED, None, HEADED], strict=True):
        want_TV = oracle.logits(output.prompt_token_ids, name).log_softmax(-1)
        check_prompt_logprobs(output.prompt_logprobs, want_TV, output.prompt_token_ids, 1)


# -- structured outputs ------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "bc"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@LOOPS
def test_structured_outputs(make_llm: MakeLLM, llm: LLM, overlap: bool) -> None:
    """They have their form, greedy or wild; what shares their steps does not change."""
    llm = llm if overlap else make_llm(overlap=False)
    regex = r"[A-Z]{2}[0-9]{1,4}(-[a-f]{3})?"
    forms = [
        StructuredOutputs(regex=regex),
        StructuredOutputs(choice=("yes", "no", "not at all")),
        StructuredOutputs(json=json.dumps(SCHEMA)),
    ]
    free = [replace(GREEDY, seed=i) for i in range(4)] + [replace(WILD, seed=i) for i in range(4)]
    names = ["upper", None, "sort", None] * 2
    prompts = [prompt_of(WORDS[i % 4]) for i in range(8)]
    alone = [o.token_ids for o in llm.generate(prompts, free, names)]
    formed = [
        replace(base, structured_outputs=form, max_tokens=200)
        for form in forms
        for base in (GREEDY, WILD, replace(WILD, ignore_eos=False, repetition_penalty=1.2))
    ]
    outputs = llm.generate(
        prompts + [prompts[0]] * 9, free + formed, names + ["upper", None, None] * 3
    )
    assert [o.token_ids for o in outputs[:8]] == alone
    texts = [o.text for o in outputs[8:]]
    assert all(re.fullmatch(regex, text) for text in texts[:3])
    assert set(texts[3:6]) <= {"yes", "no", "not at all"}
    for output in outputs[14:]:
        value = json.loads(output.text)
        assert value.keys() == {"name", "ok"} and value["name"] in ("a", "bc")
    assert {o.finish_reason for o in outputs[8:]} == {"stop"}


def test_the_grammar_is_stronger(llm: LLM) -> None:
    """Where another rule leaves nothing of what the grammar allows, the grammar holds."""
    params = replace(
        GREEDY,
        structured_outputs=StructuredOutputs(regex="a{3}b"),
        min_tokens=20,
        bad_words=("aa", "b"),
        allowed_token_ids=(100, 101),
    )
    assert llm.generate(prompt_of("hello"), params)[0].text == "aaab"


def test_structured_outputs_without_a_tokenizer(make_llm: MakeLLM, tmp_path: Path) -> None:
    shutil.copy(BASE / "config.json", tmp_path)
    bare = make_llm(tmp_path, adapters={}, load_format="dummy", skip_tokenizer_init=True)
    with pytest.raises(InvalidRequest, match="tokenizer") as caught:
        bare.generate([5, 6], replace(GREEDY, structured_outputs=StructuredOutputs(regex="a")))
    assert caught.value.param == "structured_outputs"
    with pytest.raises(InvalidRequest, match="tokenizer") as caught:
        bare.generate([5, 6], replace(GREEDY, bad_words=("a",)))
    assert caught.value.param == "bad_words"
    assert len(bare.generate([5, 6], replace(GREEDY, ignore_eos=True))[0].token_ids) == 24


# -- the wait in the queue ---------------------------------------------------------------------


def test_queue_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """From receipt to the first step, with the first event; nothing is kept afterwards."""
    monkeypatch.setattr("weft.engine.loop.time.monotonic", lambda: 10.0)
    times = QueueTimes()
    for name in ("a", "b", "left", "late"):
        times.receive(name)
    admitted = Admitted("a", 0, -1, [1], 1, SamplingParams(), 0, adapter_wait_s=0.5)
    times.begin(admitted, 12.5)
    times.begin(admitted._replace(request_id="b", adapter_wait_s=0.0), 13.0)
    times.begin(admitted, 13.0)  # again, after a preemption
    token, end = TokenEvent("a", [5]), TokenEvent("b", [], finish_reason="abort")
    left = TokenEvent("left", [], finish_reason="abort")
    stamped = times.stamp([token, end, left])
    assert [e.queue_s for e in stamped] == [2.5, 3.0, None]
    assert [e.adapter_wait_s for e in stamped] == [0.5, 0.0, None]
    assert times.adapter_waits.spread.sum == 0.5 and sum(times.adapter_waits.spread.counts) == 1
    assert times.stamp([token]) == [token]
    assert times._received.keys() == {"late"} and not times._waited


def test_events_carry_the_queue_time_once(llm: LLM) -> None:
    seen: list[TokenEvent] = []
    holds = OutputStream.holds

    def spy(stream: OutputStream, event: TokenEvent) -> Any:
        seen.append(event)
        return holds(stream, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputStream, "holds", spy)
        llm.generate([prompt_of("hello")] * 2, GREEDY)
    for request_id in {event.request_id for event in seen}:
        first, *others = [e.queue_s for e in seen if e.request_id == request_id]
        assert first is not None and 0 <= first < 60
        assert others == [None] * len(others)
