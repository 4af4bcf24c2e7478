"""What adapters bring for texts, made by somebody who means harm; and processes that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_api import HI, Web, World
from patience import PATIENCE_S, wait_until
from quick_start import children_of
from toy_tokenizers import TEMPLATE, TOOLS_TEMPLATE, byte_level, sentencepiece, thinking

from weft.core.errors import AdapterInvalid, InvalidRequest, Overloaded
from weft.text import AdapterTokenizers, Tokenizer
from weft.text.adapter_tokenizer import AdapterTokenizer, plain_decoder
from weft.text.adapter_tokenizers import OwnTokenizer
from weft.text.sandbox import limits, pool
from weft.text.sandbox.jobs import Chat, Encode, Ids
from weft.text.sandbox.pool import Call, Owner, Sandbox
from weft.text.sandbox.processes import shared_fork_server
from weft.text.templates import template_options

ENDLESS = "{% for a in range(99999) %}" * 4 + "{{ a }}" + "{% endfor %}" * 4
GOOD = "good {{ messages[0].content }}"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time than an operator would give, so that tests are quick; and penalties that outlast
    them."""
    monkeypatch.setattr(limits, "CPU_S", 0.3)
    monkeypatch.setattr(limits, "LOAD_CPU_S", 2.0)
    monkeypatch.setattr(limits, "PENALTY", 1000.0)


def chat_call(template: str, owner: Owner, messages: Any = HI, **options: Any) -> Call:
    given = template_options(template, **options)
    job = Chat(template, json.dumps([messages, given]))
    return Call(job, byte_level(), owner, "messages", 10)


def rust(tokenizer: Tokenizer | None = None, **changes: Any) -> bytes:
    """A tokenizer.json with other parts."""
    return json.dumps(json.loads((tokenizer or byte_level())._fast.to_str()) | changes).encode()


def own_of(content: bytes, base: Tokenizer | None = None) -> OwnTokenizer | None:
    return AdapterTokenizers(base or byte_level()).load({"tokenizer.json": content})


# -- templates -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hasty")
async def test_a_template_without_an_end(tmp_path: Path) -> None:
    """Its requests end in a 400, and further ones in a 429; the others go on meanwhile."""
    world = World(tmp_path, byte_level())
    web = Web(world)
    for name, template in (("bad/a", ENDLESS), ("good/a", GOOD)):
        path = Path(world.adapter(name.replace("/", "-"), "!"))
        (path / "chat_template.jinja").write_text(template)
        assert (await web.load(name, str(path))).status_code == 200
    bad = [
        asyncio.create_task(web.post("/v1/chat/completions", {"model": "bad/a", "messages": HI}))
        for _ in range(6)
    ]
    while not all(task.done() for task in bad):
        assert (await web.chat(model="good/a"))["choices"][0]["message"]["content"] == "ih doog!"
        chunks = await web.chunks("/v1/chat/completions", {"messages": HI})
        assert chunks[-1] == "[DONE]"
    answers = [await task for task in bad]
    assert sorted(a.status_code for a in answers) == [400, *[429] * 5]
    assert all(a.json()["error"]["param"] == "messages" for a in answers)
    refused = next(a for a in answers if a.status_code == 400)
    assert "more than 0.3 s" in refused.json()["error"]["message"]
    late = await web.post("/tokenize", {"model": "bad/a", "messages": HI})
    assert late.status_code == 429 and int(late.headers["retry-after"]) > 0
    world.check()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 'a' * 3000000000 }}", "memory"),
        ("{{ 'a' * 20000000 }}", "20000000 characters"),
        ("{{ raise_exception('not so') }}", "not so"),
        ("{{ ().__class__.__bases__[0].__subclasses__() }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_what_a_template_can_not_do(sandbox: Sandbox, template: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        sandbox.submit(chat_call(template, Owner("a", ""))).result(PATIENCE_S)
    assert caught.value.param == "messages"


def test_conversations_are_what_they_are_in_this_process(sandbox: Sandbox) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    talk = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}
    cases: list[tuple[Tokenizer, str, Any, dict[str, Any]]] = [
        (byte_level(), TEMPLATE, HI, {"template_kwargs": {"mood": "日本 </s>"}}),
        (sentencepiece(), TEMPLATE, HI, {}),
        (thinking(), TOOLS_TEMPLATE, talk, {"tools": [tool]}),
        (thinking(), TOOLS_TEMPLATE, HI, {"template_kwargs": {"enable_thinking": False}}),
        (
            byte_level(),
            "{%- for m in messages %}{{ bos_token }}{{ m | tojson(indent=1) }}{% generation %}"
            "{{ m.content | upper }}{% endgeneration %}{% if loop.last %}{% break %}{% endif %}"
            "{% endfor %}{{ strftime_now('%Y') }}",
            [*HI, {"role": "assistant", "content": "go on"}],
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    ]
    for tokenizer, template, messages, options in cases:
        job = Chat(template, json.dumps([messages, template_options(template, **options)]))
        call = Call(job, tokenizer, Owner("", ""), "messages", 1)
        answer = sandbox.submit(call).result(PATIENCE_S)
        assert isinstance(answer, Ids)
        assert answer.lists() == [tokenizer.with_template(template).chat(messages, **options)]


# -- tokenizers ------------------------------------------------------------------------------------

PANICS = {"type": "FixedLength", "length": 0}
SLOW = {
    "type": "Split",
    "pattern": {"Regex": "(?:a*a*a*)b"},
    "behavior": "Isolated",
    "invert": False,
}
GROWS = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Replace", "pattern": {"String": "z"}, "content": "z" * 10} for _ in range(10)
    ],
}


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("changes", "text", "says"),
    [
        ({"pre_tokenizer": PANICS}, "text", "must be non-zero"),
        ({"pre_tokenizer": SLOW}, ("a" * 150 + " ") * 20_000, "more than 0.3 s"),
        ({"normalizer": GROWS}, "zz", "memory|more than"),
    ],
    ids=["panics", "slow", "grows"],
)
def test_a_tokenizer_that_fails_on_texts(
    tmp_path: Path, changes: dict[str, Any], text: str, says: str
) -> None:
    """It fails that text alone. (Where it fails on all, it fails when it is loaded.)"""
    own = _loaded(changes)
    call = Call(Encode([text], False), own, Owner("a", ""), "prompt", len(text))
    sandbox = Sandbox()
    with pytest.raises(InvalidRequest, match=says) as caught:
        sandbox.submit(call).result(PATIENCE_S)
    assert caught.value.param == "prompt"
    good = Call(Encode(["the text"], False), byte_level(), Owner("", ""), "prompt", 1)
    answer = sandbox.submit(good).result(PATIENCE_S)
    assert isinstance(answer, Ids)
    assert answer.lists() == [byte_level().encode("the text", add_special_tokens=False)]


def _loaded(changes: dict[str, Any]) -> Tokenizer:
    """A tokenizer for the sandbox alone."""
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerFast

    made = RustTokenizer.from_str(rust(**changes).decode())
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=made))


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            rust(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}),
            "no tokenizer|fails",
        ),
        (rust(pre_tokenizer=PANICS), "must be non-zero"),
        (
            rust(decoder={"type": "Strip", "content": " ", "start": 0, "stop": 3}),
            "Strip.*not served",
        ),
        (
            rust(decoder={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}),
            "Replace.*not served",
        ),
        (
            rust(decoder={"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}),
            "Replace.*not served",
        ),
        (
            rust(decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}] * 9}),
            "9 parts",
        ),
        (
            rust(
                added_tokens=[
                    {
                        "id": 500,
                        "content": "x" * 2000,
                        **dict.fromkeys(
                            ("single_word", "lstrip", "rstrip", "normalized", "special"), False
                        ),
                    }
                ]
            ),
            "2000 characters",
        ),
    ],
)
def test_tokenizers_that_are_refused(content: bytes, says: str) -> None:
    with pytest.raises(AdapterInvalid, match=says) as caught:
        own_of(content)
    assert caught.value.param == "tokenizer.json"


def test_a_tokenizer_that_takes_long_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOAD_CPU_S", 0.05)
    vocab = {f"{'x' * (i % 7)}{i}": i for i in range(40_000)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "0"}
    with pytest.raises(AdapterInvalid, match=r"tokenizer\.json: .*more than 0\.05 s"):
        own_of(rust(model=model, added_tokens=[]))


@pytest.mark.parametrize("make", [byte_level, sentencepiece, thinking])
def test_an_adapter_s_tokenizer_reads_as_the_whole_one(make: Callable[[], Tokenizer]) -> None:
    whole = make()
    base = sentencepiece() if make is not sentencepiece else byte_level()
    own = own_of(rust(whole), base)
    assert own is not None and isinstance(own.tokenizer, AdapterTokenizer)
    reader, chance = own.tokenizer, random.Random(0)
    assert reader.special_ids == whole.special_ids
    assert reader.vocab_size == whole.vocab_size
    assert reader.max_chars_per_token == whole.max_chars_per_token
    assert reader.spelling == whole.spelling
    assert reader.added_tokens == whole.added_tokens
    ids = range(whole.vocab_size + 3)
    assert [reader.token_bytes(i) for i in ids] == [whole.token_bytes(i) for i in ids]
    for mark in ("<think>", "</think>", "<tool_call>", "[ARGS]"):
        assert reader.mark_id(mark) == whole.mark_id(mark)
    for _ in range(200):
        some = [chance.choice(ids) for _ in range(chance.randrange(9))]
        for skip in (False, True):
            assert reader.decode(some, skip) == whole.decode(some, skip)


def test_decoders_are_what_they_are_in_rust() -> None:
    from tokenizers import decoders

    pieces = ["▁the", "##x", "</w>a</w>", "<0xE6>", "<0x97>", "  b", "Ġc", "n 't"]
    some = [
        decoders.ByteLevel(),
        decoders.Metaspace("_", "first", False),
        decoders.WordPiece("##", True),
        decoders.BPEDecoder("</w>"),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Sequence([decoders.ByteFallback()])]
        ),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ]
    for decoder in some:
        state = decoder.__getstate__().decode()
        assert plain_decoder(state).decode(pieces) == decoder.decode(pieces)
    with pytest.raises(AdapterInvalid, match="CTC"):
        plain_decoder(decoders.CTC().__getstate__().decode())


# -- long texts ------------------------------------------------------------------------------------


async def test_long_texts_go_to_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, byte_level(), long_text_chars=150)
    calls: list[Call] = []
    submit = Sandbox.submit
    monkeypatch.setattr(Sandbox, "submit", lambda *a: calls.append(a[1]) or submit(*a))
    text = "the 日本 " * 40
    ids = byte_level().encode(text)
    web = Web(world)
    await web.complete(prompt="abc")
    await web.chat()
    assert not calls
    assert (await web.post("/tokenize", {"prompt": text})).json()["tokens"] == ids
    assert (await web.post("/detokenize", {"tokens": ids})).json()["prompt"] == text
    await web.complete(prompt=text, truncate_prompt_tokens=5, max_tokens=1)
    assert world.engine.requests[-1].prompt_ids == ids[-5:]
    await web.chat(messages=[{"role": "user", "content": ""}] * 12, truncate_prompt_tokens=5)
    await web.complete(prompt="abc", bad_words=["x" * 90])
    assert [type(call.job).__name__ for call in calls] == [
        *("Encode", "Decode", "Encode", "Chat", "Encode")
    ]
    world.check()


# -- processes -------------------------------------------------------------------------------------


def test_a_killed_process_is_replaced() -> None:
    sandbox = Sandbox(num_workers=1)
    call = lambda: sandbox.submit(chat_call(TEMPLATE, Owner("a", "")))  # noqa: E731
    before = call().result(PATIENCE_S)
    server = shared_fork_server()._process
    pids = children_of(server.pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(runs, pids)))
    assert call().result(PATIENCE_S) == before
    pids = children_of(server.pid)
    server.kill()
    server.wait()
    wait_until(lambda: not any(map(runs, pids)))
    assert call().result(PATIENCE_S) == before


def test_no_process_outlives_the_server() -> None:
    script = """
import sys, time
from types import SimpleNamespace
from weft.text.sandbox.jobs import Encode, Material
from weft.text.sandbox.pool import Call, Owner, Sandbox
words = SimpleNamespace(material=Material.of(sys.argv[1], {}))
Sandbox().submit(Call(Encode(["x"], False), words, Owner("", ""), "p", 1)).result()
print("ready", flush=True)
time.sleep(600)
"""
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", script, rust().decode()],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    ) as server:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        (fork_server,) = children_of(server.pid)
        pids = [fork_server, *children_of(fork_server)]
        server.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(map(runs, pids)))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# -- turns -----------------------------------------------------------------------------------------


class SlowProcess:
    """A worker process that only waits, for `gate` and for a while."""

    kind = limits.WorkerKind.CHATS
    spent = False
    at_work: list[str] = []  # noqa: RUF012

    def __init__(self, kind: object) -> None: ...

    def ask(self, job: Encode, *_: object) -> Ids:
        begun.append(job.texts[0])
        self.at_work.append(job.texts[0])
        owners = [name[0] for name in self.at_work]
        assert len(set(owners)) == len(owners), "an owner has one at a time"
        gate(job.texts[0])
        time.sleep(0.01)
        self.at_work.remove(job.texts[0])
        return Ids([])

    def end(self) -> int:
        return 0


begun: list[str] = []
Gate = Callable[[str], object]


def gate(name: str) -> None:
    """Waits until a text may go on; tests put others in its place."""


@pytest.fixture
def set_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Gate], None]]:
    """Workers only wait, and what is given here says for what."""
    monkeypatch.setattr(pool, "TextProcess", SlowProcess)
    yield lambda found: monkeypatch.setattr(sys.modules[__name__], "gate", found)
    begun.clear()


def text_call(name: str, size: int = 1) -> Call:
    return Call(Encode([name], False), byte_level(), Owner(name[0], ""), "prompt", size)


def test_an_owner_has_one_text_at_a_time(set_gate: Callable[[Gate], None]) -> None:
    """The first three texts of one wait for the first three of the other."""
    pairs = threading.Barrier(2)
    set_gate(lambda name: int(name[1:]) < 3 and pairs.wait(PATIENCE_S))
    sandbox = Sandbox()
    futures = [sandbox.submit(text_call(f"a{n}")) for n in range(10)]
    futures += [sandbox.submit(text_call(f"b{n}")) for n in range(3)]
    for future in futures:
        future.result(PATIENCE_S)
    assert begun.index("b2") < begun.index("a3")


def test_texts_whose_senders_have_left_take_no_place(
    monkeypatch: pytest.MonkeyPatch, set_gate: Callable[[Gate], None]
) -> None:
    left = threading.Event()
    set_gate(lambda name: left.wait(PATIENCE_S))
    monkeypatch.setattr(limits, "MAX_WAITING", 3)
    sandbox = Sandbox()
    first = sandbox.submit(text_call("a0"))
    wait_until(lambda: begun == ["a0"])
    for n in range(9):
        assert sandbox.submit(text_call(f"a{n}")).cancel()
    last = sandbox.submit(text_call("a9"))
    left.set()
    for future in (first, last):
        future.result(PATIENCE_S)


def test_too_many_texts_of_one_author_are_refused(
    monkeypatch: pytest.MonkeyPatch, set_gate: Callable[[Gate], None]
) -> None:
    refused = threading.Event()
    set_gate(lambda name: name == "b" or refused.wait(PATIENCE_S))
    monkeypatch.setattr(limits, "MAX_WAITING", 3)
    sandbox = Sandbox()
    futures = []
    with pytest.raises(Overloaded):
        for n in range(20):
            futures.append(sandbox.submit(text_call(f"a{n}")))  # noqa: PERF401
    sandbox.submit(text_call("b")).result(PATIENCE_S)
    refused.set()
    for future in futures:
        future.result(PATIENCE_S)
    monkeypatch.setattr(limits, "MAX_WAIT_S", 0.0)
    with pytest.raises(Overloaded, match="too long"):
        sandbox.submit(text_call("a")).result(PATIENCE_S)


def test_short_texts_pass_long_ones(set_gate: Callable[[Gate], None]) -> None:
    all_there = threading.Event()
    set_gate(lambda _: all_there.wait(PATIENCE_S))
    sandbox = Sandbox(num_workers=1)
    sizes = {"-first": 1, "-long": 10**7, "-short": 1}
    calls = [
        Call(Encode([name], False), byte_level(), Owner("", ""), "prompt", size)
        for name, size in sizes.items()
    ]
    futures = [sandbox.submit(call) for call in calls]
    all_there.set()
    for future in futures:
        future.result(PATIENCE_S)
    assert begun[-1] == "-long"


# -- ignored ---------------------------------------------------------------------------------------


def test_adapters_templates_can_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "load", None)
    tokenizers = AdapterTokenizers(byte_level(), ignore=True)
    assert tokenizers.load({"chat_template.jinja": ENDLESS.encode()}) is None
    assert tokenizers.load({"tokenizer.json": rust(pre_tokenizer=PANICS)}) is None
    token = {"id": 999, "content": "<tag>"}
    for files, file in (
        ({"tokenizer.json": rust(added_tokens=[token])}, "tokenizer.json"),
        ({"added_tokens.json": b'{"<tag>": 999}'}, "added_tokens.json"),
        ({"tokenizer.json": b"{"}, "tokenizer.json"),
        ({"added_tokens.json": b"["}, "added_tokens.json"),
        ({"tokenizer.json": b'{"added_tokens": [{"id": 1, "content": "\xff"}]}'}, "tokenizer.json"),
        ({"added_tokens.json": b'{"\xff": 1}'}, "added_tokens.json"),
    ):
        with pytest.raises(AdapterInvalid) as caught:
            tokenizers.load(files)
        assert caught.value.param == file


def test_millions_of_tokens_that_are_ignored_are_not_parsed() -> None:
    """Parsing them holds up all other threads."""
    tokenizers = AdapterTokenizers(byte_level(), ignore=True)
    many = b"{" + b",".join(b'"%d": 1' % n for n in range(1 << 16)) + b"}"
    more = b'{"added_tokens": [' + b'{"id": 1, "content": "a"},' * (1 << 16) + b"]}"
    for files in ({"added_tokens.json": many}, {"tokenizer.json": more}):
        with pytest.raises(AdapterInvalid, match="more tokens than the base has"):
            tokenizers.load(files)
