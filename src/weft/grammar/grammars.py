"""Outputs of a given form: grammars, compiled beside the engine's loop, and their matchers.

Compiling is xgrammar's work, on threads of our own. What a client sends is hostile until proven
otherwise: texts are bounded in size and depth, keywords that would not be enforced are refused
(see `weft.grammar.schema`), a compilation that takes too long is given up, and a matcher that costs
more time than a step may cost ends its own request.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import Overloaded, WeftError, from_wire, to_wire
from weft.core.sampling import StructuredOutputs
from weft.grammar.schema import enforceable, enforceable_regex, refusal
from weft.text import Tokenizer

MAX_BYTES = 64 * 1024
"""The most characters that the text of one form may have."""
MAX_DEPTH = 128
"""How deep brackets in JSON may be nested; xgrammar bounds other forms itself."""
MAX_WHITESPACE = 32
"""Characters in a row between the parts of JSON: models may else go on with it for ever."""
COMPILE_TIMEOUT_S = 10.0
_CACHE_BYTES = 256 << 20
_NUM_WORKERS = 2
_MAX_STUCK = 4
"""Threads that may be lost to compilations that don't end, before requests are turned away."""
_BURST_S = 0.5
_STEP_S = 0.01
"""A matcher may take this long for each token, on average, beyond a burst."""

Words = NDArray[np.int32]

_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+:\d+: |Check failed: .*? is false: ")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BOUNDED_STRING = re.compile(r'^(\w+) ::= \(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)
"""xgrammar's rule for the characters of a string with minLength or maxLength. It allows control
characters, which JSON does not, and no escapes, which texts need."""
_CHARACTER = (
    r'\1 ::= ([^\\0-\\x1f\\"\\\\\\uD800-\\uDFFF] | "\\\\" [\\"\\\\/bfnrt] '
    r'| "\\\\u00" [01] [0-9a-f])'
)


class GrammarMatcher:
    """State of one request's output, for the engine's thread alone."""

    def __init__(self, matcher: Any, begin_after: int | None, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._begin_after = begin_after
        self._vocabulary = vocabulary
        self._ended = False
        self._stuck = False
        self._spent_s = -_BURST_S

    def accept(self, token_id: int) -> None:
        """A token was chosen: one that `fill` allowed.

        Raises InvalidRequest, the end of the request, when the grammar can't go on after the
        output so far, or has cost too much time.
        """
        if self._begin_after is not None:
            if token_id == self._begin_after:
                self._begin_after = None
        elif self._stuck:
            raise refusal("nothing that the tokenizer can write follows the output so far")
        elif not self._ended:
            self._advance(token_id)

    def fill(self, words: Words) -> None:
        """Keep the bits of the tokens that may come next, and clear all others. Where none may,
        all but EOS stay, and `accept` refuses what is chosen. Tokens that an adapter adds are in
        no form."""
        known = np.zeros_like(self._vocabulary.eos)
        known[: len(words)] = words[: len(known)]
        allowed = self._vocabulary.before
        if self._begin_after is None:
            allowed = self._next(known)
        words[:] = 0
        words[: len(known)] = (allowed & known)[: len(words)]

    def _next(self, known: Words) -> Words:
        """What may come next where the form binds, of the `known` tokens."""
        if self._ended:
            return self._vocabulary.eos
        allowed = np.zeros_like(known)
        begin_s = time.thread_time()
        self._matcher.fill_next_token_bitmask(allowed)
        allowed &= self._vocabulary.any  # xgrammar sets bits beyond its vocabulary
        self._spent_s += time.thread_time() - begin_s
        self._stuck = not (allowed & known).any()
        return self._vocabulary.before if self._stuck else allowed

    def _advance(self, token_id: int) -> None:
        begin_s = time.thread_time()
        accepted = self._matcher.accept_token(token_id)
        self._spent_s = max(self._spent_s + time.thread_time() - begin_s - _STEP_S, -_BURST_S)
        self._ended = not accepted or self._matcher.is_terminated()
        if self._spent_s > 0:
            raise refusal("the grammar is too ambiguous to be followed in time")


class Vocabulary:
    """The tokenizer as xgrammar sees it, and the masks that need no grammar.

    Special tokens are spelled with a byte that no text has: a form can name them, but none has
    them by chance, since they don't show in the output. Rows of the model without a token are
    never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: tuple[int, ...]) -> None:
        spelled = [tokenizer.token_bytes(i) for i in range(size)]
        for i in tokenizer.special_ids:
            if i < size:
                spelled[i] = b"\xff" + spelled[i]
        for i in eos_ids:
            spelled[i] = b""
        self.spelled = spelled
        self.size = size
        self.eos_ids = eos_ids
        self.before = _words([i for i in range(size) if spelled[i]], size)
        """Before the form binds: all but EOS."""
        self.eos = _words(eos_ids, size)
        self.any = self.before | self.eos

    @cached_property
    def id_of_special(self) -> dict[str, int]:
        return {t[1:].decode(): i for i, t in enumerate(self.spelled) if t[:1] == b"\xff"}


def _words(token_ids: Iterable[int], size: int) -> Words:
    bits = np.zeros(-(-size // 32) * 32, dtype=np.bool_)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class Compiler:
    """Forms to matchers. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise refusal("this server lacks a package for it: pip install xgrammar") from error
        self._xgrammar = xgrammar
        self._vocabulary = vocabulary
        info = xgrammar.TokenizerInfo(
            vocabulary.spelled,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=2, cache_limit_bytes=_CACHE_BYTES
        )

    def matcher(self, spec: StructuredOutputs) -> GrammarMatcher:
        """Raises InvalidRequest, saying in one line what is wrong with the form."""
        begin_after = spec.begin_after_token
        if begin_after is not None and not self._can_begin_after(begin_after):
            raise refusal(f"token {begin_after} can't come before the form")
        try:
            compiled = self._compile(spec)
        except WeftError:
            raise
        except Exception as error:  # of the many kinds that xgrammar raises
            reason = " ".join(_LOG_PREFIX.sub("", str(error)).split())
            raise refusal(reason[:300]) from error
        if not self._allows_anything(compiled):
            raise refusal("no output has this form")
        state = self._xgrammar.GrammarMatcher(compiled)
        return GrammarMatcher(state, begin_after, self._vocabulary)

    def _can_begin_after(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocabulary.size and bool(self._vocabulary.spelled[token_id])

    def _allows_anything(self, compiled: Any) -> bool:
        words = np.zeros_like(self._vocabulary.eos)
        self._xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(words)
        return bool(words.any())

    def _compile(self, spec: StructuredOutputs) -> Any:
        if spec.json is not None:
            return self._compiler.compile_grammar(self._json_grammar(_parse(spec.json)))
        if spec.json_object:
            return self._compiler.compile_grammar(self._json_grammar({"type": "object"}))
        if spec.regex is not None:
            _check_size(spec.regex)
            return self._compiler.compile_regex(enforceable_regex(spec.regex))
        if spec.grammar is not None:
            _check_size(spec.grammar)
            return self._compiler.compile_grammar(spec.grammar)
        if spec.structural_tag is not None:
            tag = _parse(spec.structural_tag)
        else:
            _check_size("".join(spec.choice))
            choices = [{"type": "const_string", "value": choice} for choice in spec.choice]
            tag = {"type": "structural_tag", "format": {"type": "or", "elements": choices}}
        return self._compiler.compile_structural_tag(json.dumps(self._tag(tag)))

    def _json_grammar(self, schema: object) -> str:
        text = json.dumps(enforceable(schema), ensure_ascii=False)
        grammar = self._xgrammar.Grammar.from_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)
        return _BOUNDED_STRING.sub(_CHARACTER, str(grammar))

    def _tag(self, tag: Any) -> Any:
        """A structural tag, or a part of one, with what it holds made enforceable."""
        if isinstance(tag, list):
            return [self._tag(part) for part in tag]
        if not isinstance(tag, dict):
            return tag
        kind = tag.get("type")
        if kind == "json_schema":
            for key in sorted(tag.keys() - {"type", "json_schema"}):
                if (key, tag[key]) != ("style", "json"):
                    raise refusal(f"{key!r} of a json_schema in a structural tag is not supported")
            return {"type": "grammar", "grammar": self._json_grammar(tag.get("json_schema"))}
        if kind == "regex" and isinstance(tag.get("pattern"), str):
            return {**tag, "pattern": enforceable_regex(tag["pattern"])}
        if kind == "token" and isinstance(tag.get("token"), str):
            return {**tag, "token": self._token_id(tag["token"])}
        if kind == "qwen_xml_parameter":
            raise refusal("'qwen_xml_parameter' in a structural tag is not supported")
        return {key: self._tag(value) for key, value in tag.items()}

    def _token_id(self, name: str) -> int:
        token_id = self._vocabulary.id_of_special.get(name)
        if token_id is None:
            raise refusal(f"the tokenizer has no special token {name[:80]!r}")
        return token_id


def _check_size(text: str) -> None:
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise refusal(f"more than {MAX_BYTES} bytes")


def _parse(text: str) -> Any:
    """JSON of bounded size and depth."""
    _check_size(text)
    depth = deepest = 0
    for char in _JSON_STRING.sub("", text):
        depth += (char in "[{") - (char in "]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise refusal(f"nested deeper than {MAX_DEPTH} levels")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise refusal(f"invalid JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


@dataclass(slots=True, eq=False)
class _Job:
    request_id: str
    spec: StructuredOutputs
    deadline_s: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)
    given_up: bool = False


class Grammars:
    """Compiles the forms of requests on its own threads; what is ready is polled.

    Threads start with the first form, which also loads the tokenizer and xgrammar. What was
    compiled lately is kept. `wake` is called, on any thread, when there is something to poll.

    A compilation can't be stopped: its thread is given up after `COMPILE_TIMEOUT_S`, and another
    takes its place as long as few are lost.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer | None],
        vocab_size: int,
        eos_token_ids: Iterable[int],
        wake: Callable[[], None],
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(sorted({i for i in eos_token_ids if 0 <= i < vocab_size}))
        self._wake = wake
        self._compiler: Compiler | None = None
        self._compiler_lock = threading.Lock()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._begun: SimpleQueue[_Job | None] = SimpleQueue()
        """Jobs in the order of their deadlines."""
        self._ready: SimpleQueue[tuple[str, GrammarMatcher | WeftError]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        """It guards the attributes below, and the end of each job."""
        self._num_working = 0
        self._num_stuck = 0

    def start(self, request_id: str, spec: StructuredOutputs) -> None:
        """Begin to compile; the outcome is polled. Never blocks."""
        if not self._threads:
            self._spawn(self._watch)
            with self._lock:
                self._add_workers()
        self._jobs.put(_Job(request_id, spec))
        if not self._num_working:
            self._turn_away()

    def poll(self) -> list[tuple[str, GrammarMatcher | WeftError]]:
        """The outcomes since the last call, by request id: a matcher, or why there is none."""
        return [self._ready.get() for _ in range(self._ready.qsize())]

    def close(self) -> None:
        """End the threads, but for those that are lost to a compilation."""
        self._begun.put(None)
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _spawn(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="weft-grammar", daemon=True)
        thread.start()
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]

    def _add_workers(self) -> None:
        while self._num_working < _NUM_WORKERS and self._num_stuck < _MAX_STUCK:
            self._num_working += 1
            self._spawn(self._work)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            outcome = self._outcome(job)
            with self._lock:
                job.done.set()
                if job.given_up:
                    self._num_stuck -= 1
                    self._add_workers()
                    return
            self._report(job, outcome)

    def _outcome(self, job: _Job) -> GrammarMatcher | WeftError:
        try:
            with self._compiler_lock:
                if self._compiler is None:
                    self._compiler = self._load()
            job.deadline_s = time.monotonic() + COMPILE_TIMEOUT_S
            self._begun.put(job)
            return self._compiler.matcher(job.spec)
        except Exception as error:
            return error if isinstance(error, WeftError) else from_wire(to_wire(error))

    def _load(self) -> Compiler:
        if not self._eos_ids:
            raise refusal("the model has no EOS token, which ends every form")
        tokenizer = self._load_tokenizer()
        if tokenizer is None:
            raise refusal("a form needs a tokenizer, and none is loaded")
        return Compiler(Vocabulary(tokenizer, self._vocab_size, self._eos_ids))

    def _watch(self) -> None:
        while (job := self._begun.get()) is not None:
            if not job.done.wait(max(job.deadline_s - time.monotonic(), 0.0)):
                self._give_up(job)

    def _give_up(self, job: _Job) -> None:
        with self._lock:
            if job.done.is_set():
                return
            job.given_up = True
            self._num_working -= 1
            self._num_stuck += 1
            self._add_workers()
        self._report(job, refusal(f"compiling it takes longer than {COMPILE_TIMEOUT_S:g} s"))
        if not self._num_working:
            self._turn_away()

    def _turn_away(self) -> None:
        """All threads are lost: nothing that waits would ever begin."""
        with contextlib.suppress(Empty):
            while (job := self._jobs.get_nowait()) is not None:
                self._report(job, Overloaded("too many structured outputs are being compiled"))

    def _report(self, job: _Job, outcome: GrammarMatcher | WeftError) -> None:
        self._ready.put((job.request_id, outcome))
        self._wake()
