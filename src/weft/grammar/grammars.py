"""Has the forms of structured outputs compiled: each form once for all requests that ask for it,
while the engine's loop goes on.

A client's form is treated as hostile. Forms are bounded in size and depth
(`weft.grammar.check`), keywords that would not be enforced are refused (`weft.grammar.schema`), and
a process that can be killed compiles each form and follows it for a while before this one touches
it (`weft.grammar.fork_server`). A matcher that costs more time than a step may cost ends its own
request, and its form is refused from then on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from weft.core.errors import InvalidRequest, WeftError, from_wire, to_wire
from weft.core.sampling import StructuredOutputs
from weft.core.tenants import Tenant
from weft.grammar.check import check_form
from weft.grammar.compiler import Compiler, Limits
from weft.grammar.matcher import GrammarMatcher
from weft.grammar.processes import CompilerProcesses
from weft.grammar.regex import refusal
from weft.grammar.vocabulary import Vocabulary
from weft.grammar.waiting import WaitingForms
from weft.text import Tokenizer

MAX_AT_ONCE = 4
MAX_AT_ONCE_EACH = 2
"""How many forms are compiled at a time: in all, and for one tenant."""
LIMITS = Limits()
CACHE_BYTES = 256 << 20
"""How much memory the compiled forms kept for later requests may take."""
ENTRY_BYTES = 1 << 16
"""The least that one form counts for."""

Outcome = GrammarMatcher | WeftError


@dataclass(frozen=True, slots=True)
class _Result:
    """The result for a form: xgrammar's compiled grammar, or why the form is refused."""

    compiled: Any
    num_bytes: int = ENTRY_BYTES


@dataclass(slots=True)
class _Asked:
    """The requests that wait for a form."""

    requests: list[tuple[str, StructuredOutputs]] = field(default_factory=list)
    """By id, with what each asks for, which also says where in the output the form begins."""
    tenants: set[str] = field(default_factory=set)
    begun: bool = False
    """Whether it is being compiled."""


class _Cache:
    """The results for the forms that were used last."""

    def __init__(self) -> None:
        self._forms: OrderedDict[StructuredOutputs, _Result] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: StructuredOutputs) -> _Result | None:
        if key in self._forms:
            self._forms.move_to_end(key)
        return self._forms.get(key)

    def put(self, key: StructuredOutputs, form: _Result) -> None:
        """Keep a result, unless another attempt may turn out better."""
        if key in self._forms:
            self._num_bytes -= self._forms.pop(key).num_bytes
        if isinstance(form.compiled, WeftError) and not isinstance(form.compiled, InvalidRequest):
            return
        self._forms[key] = form
        self._num_bytes += form.num_bytes
        while self._num_bytes > CACHE_BYTES:
            self._num_bytes -= self._forms.popitem(last=False)[1].num_bytes


def _typed(error: Exception) -> WeftError:
    return error if isinstance(error, WeftError) else from_wire(to_wire(error))


class Grammars:
    """Compiles the forms of requests; `poll` returns what is ready.

    Threads and processes start with the first form, which also loads the tokenizer and xgrammar.
    Each thread waits for one process at a time. `wake` is called, on any thread, when there is
    something to poll.
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
        self._compilers: tuple[Compiler, CompilerProcesses] | None = None
        self._loading = threading.Lock()
        self._ready: SimpleQueue[tuple[str, Outcome]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        """Guards the attributes below."""
        self._closed = False
        self._forms = WaitingForms(MAX_AT_ONCE_EACH)
        self._asked: dict[StructuredOutputs, _Asked] = {}
        """Who waits for each form."""
        self._cache = _Cache()

    def set_tenants(self, tenants: Iterable[Tenant]) -> None:
        """See `WaitingForms.set_tenants`."""
        with self._changed:
            self._forms.set_tenants(tenants)

    def start(self, request_id: str, spec: StructuredOutputs, tenant: str = "") -> None:
        """Begin to compile; the outcome is polled. Never blocks."""
        key = replace(spec, begin_after_token=None, reasoning_token=None)
        with self._changed:
            known = self._cache.get(key)
            if known is None:
                try:
                    self._wait(key, tenant).requests.append((request_id, spec))
                except WeftError as error:
                    known = _Result(error)
        if known is not None:
            self._report(request_id, self._outcome(key, known, spec))

    def _wait(self, key: StructuredOutputs, tenant: str) -> _Asked:
        """Queue a form for a tenant. If several tenants want it, the first of them to have a turn
        gets it compiled. Raises Overloaded."""
        asked = self._asked.get(key, _Asked())
        if tenant not in asked.tenants:
            self._forms.add(tenant, key)
            asked.tenants.add(tenant)
            self._asked[key] = asked
            if len(self._threads) < MAX_AT_ONCE:
                thread = threading.Thread(target=self._work, name="weft-forms", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return asked

    def poll(self) -> list[tuple[str, Outcome]]:
        """The outcomes since the last call, by request id: a matcher, or why there is none."""
        return [self._ready.get() for _ in range(self._ready.qsize())]

    def stuck_s(self) -> float:
        """For how many seconds no form has made progress, though some wait. For any thread."""
        compilers = self._compilers
        return 0.0 if compilers is None else compilers[1].stuck_s()

    def close(self) -> None:
        """End processes and threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._compilers is not None:
            self._compilers[1].close()
        for thread in self._threads:
            thread.join(timeout=1.0)

    # -- threads -------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._next()) is not None:
            tenant, key = job
            form = self._compile(key)
            with self._changed:
                self._forms.ended(tenant)
                asked = self._asked.pop(key)
                self._cache.put(key, form)
                self._changed.notify_all()
            for request_id, spec in asked.requests:
                self._report(request_id, self._outcome(key, form, spec))

    def _next(self) -> tuple[str, StructuredOutputs] | None:
        """The form to compile now, and whose it is; None at the end."""
        with self._changed:
            while not self._closed:
                job = self._forms.take()
                if job is None:
                    self._changed.wait()
                    continue
                asked = self._asked.get(job[1])
                if asked is not None and not asked.begun:
                    asked.begun = True
                    return job
                self._forms.ended(job[0])  # another tenant wants the same, and was first
        return None

    def _compile(self, key: StructuredOutputs) -> _Result:
        try:
            check_form(key)
            compiler, processes = self._load()
            answer = processes.compile(key)
            compiled = compiler.revive(answer.text) if answer.text else compiler.compile(key)
            return _Result(compiled, ENTRY_BYTES + answer.resident_bytes)
        except Exception as error:
            return _Result(error if isinstance(error, WeftError) else from_wire(to_wire(error)))

    def _load(self) -> tuple[Compiler, CompilerProcesses]:
        with self._loading:
            if self._compilers is None:
                if not self._eos_ids:
                    raise refusal("the model has no EOS token, which ends every form")
                tokenizer = self._load_tokenizer()
                if tokenizer is None:
                    raise refusal("a form needs a tokenizer, and none is loaded")
                vocabulary = Vocabulary.of(tokenizer, self._vocab_size, self._eos_ids)
                # They start while xgrammar is imported.
                processes = CompilerProcesses(vocabulary, LIMITS, MAX_AT_ONCE)
                self._compilers = Compiler(vocabulary, num_threads=2), processes
            return self._compilers

    def _outcome(self, key: StructuredOutputs, form: _Result, spec: StructuredOutputs) -> Outcome:
        """A matcher of its own for a request that asks for `spec`, or why there is none."""
        if isinstance(form.compiled, WeftError):
            return form.compiled
        assert self._compilers is not None
        try:
            return self._compilers[0].matcher(
                form.compiled, spec, lambda error: self._refuse(key, error)
            )
        except Exception as error:
            return _typed(error)

    def _refuse(self, key: StructuredOutputs, error: WeftError) -> None:
        """Refuse this form from now on."""
        with self._changed:
            self._cache.put(key, _Result(error))

    def _report(self, request_id: str, outcome: Outcome) -> None:
        self._ready.put((request_id, outcome))
        self._wake()
