"""The work of a worker process: the only place where what adapters bring is run."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from itertools import zip_longest
from typing import Any

import msgspec

from weft.core import frames
from weft.core.errors import InvalidRequest, WeftError, to_wire
from weft.text.sandbox.jobs import (
    Answer,
    Answered,
    Chat,
    Decode,
    Encode,
    Ids,
    LoadTokenizer,
    Material,
    Missing,
    Refused,
    Task,
    Text,
)
from weft.text.sandbox.limits import KEPT_TOKENIZERS, MAX_TEXT_CHARS, WORN_BYTES, WORN_JOBS
from weft.text.templates import render, template_options


def serve(connection: socket.socket) -> None:
    """Do the tasks that come from this socket, until its other end closes. The CPU time for a task
    is limited by a timer whose signal ends the process."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    tokenizers = _Tokenizers()
    num_jobs = 0
    while True:
        try:
            message = frames.receive(connection)
        except EOFError:
            return
        task = msgspec.msgpack.decode(message, type=Task)
        signal.setitimer(signal.ITIMER_PROF, task.cpu_s)
        answer = _answer(task, tokenizers)
        signal.setitimer(signal.ITIMER_PROF, 0)
        num_jobs += 1
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        worn = num_jobs >= WORN_JOBS or largest >= WORN_BYTES
        frames.send(connection, msgspec.msgpack.encode(Answered(answer, worn)))


class _Kept:
    """A tokenizer, and what templates see of it."""

    def __init__(self, material: Material) -> None:
        from tokenizers import Tokenizer

        self.rust = Tokenizer.from_str(zlib.decompress(material.packed).decode())
        self.rust.no_truncation()
        self.rust.no_padding()
        self._special_tokens = material.special_tokens

    @cached_property
    def hf(self) -> Any:
        return _shell(self._special_tokens)

    def encode(self, text: str, add_special_tokens: bool, second: str | None = None) -> list[int]:
        special = add_special_tokens
        ids: list[int] = self.rust.encode(text, second, add_special_tokens=special).ids
        return ids


def _shell(special_tokens: Mapping[str, str]) -> Any:
    """A tokenizer of transformers, as far as `apply_chat_template` needs one."""
    from transformers import PreTrainedTokenizerBase

    shown = {"special_tokens_map": special_tokens, "chat_template": None}
    kind = type("Shell", (PreTrainedTokenizerBase,), shown)
    return object.__new__(kind)


_ALL_IN_ALL = r"""{%- set n = namespace(a='\u00e9\n') %}{{ n.a | tojson }}{{ strftime_now('%d') }}
{%- generation %}{% for c in [1, 2] %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}
{%- endgeneration %}{{ {'a': [1]} | pprint }}{{ lipsum(1) }}{{ 'a b' | urlize | wordwrap(1) }}
{%- macro m(x) %}{{ x }}{% endmacro %}{{ m(messages | map(attribute='role') | random) }}
{{- raise_exception('all is imported') }}"""


def rehearse() -> None:
    """Render a template with many features. Workers can't open files, so whatever jinja imports
    late must be imported before they are forked."""
    options = template_options(_ALL_IN_ALL)
    with contextlib.suppress(InvalidRequest):
        render(_shell({}), _ALL_IN_ALL, [{"role": "user"}], options)


class _Tokenizers:
    """The tokenizers that were used last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def get(self, task: Task) -> _Kept | None:
        if task.key not in self._kept:
            if task.material is None:
                return None
            while len(self._kept) >= KEPT_TOKENIZERS:
                self._kept.popitem(last=False)
            self._kept[task.key] = _Kept(task.material)
        self._kept.move_to_end(task.key)
        return self._kept[task.key]


def _answer(task: Task, tokenizers: _Tokenizers) -> Answer:
    try:
        if isinstance(task.job, LoadTokenizer):
            from weft.text.sandbox.loading import load

            return load(task.job)
        kept = tokenizers.get(task)
        return Missing() if kept is None else _do(task.job, kept)
    except WeftError as error:
        if isinstance(error.__cause__, MemoryError):
            return Refused(error.kind, "it takes more memory than it may have", error.param)
        return Refused(*to_wire(error))
    except MemoryError:
        return Refused(InvalidRequest.kind, "it takes more memory than it may have", None)
    except BaseException as error:  # a panic of Rust is no Exception
        said = " ".join(str(error).split())[:300]
        return Refused(InvalidRequest.kind, f"the tokenizer fails on it: {said}", None)


def _do(job: Encode | Decode | Chat, kept: _Kept) -> Answer:
    match job:
        case Encode():
            pairs = zip_longest(job.texts, job.seconds)
            return Ids.of([kept.encode(a, job.add_special_tokens, b) for a, b in pairs])
        case Decode():
            return Text(kept.rust.decode(job.ids, skip_special_tokens=False))
        case Chat():
            return Ids.of([kept.encode(_written(job, kept.hf), add_special_tokens=False)])


def _written(job: Chat, hf: Any) -> str:
    messages, options = json.loads(job.conversation)
    assert isinstance(messages, list) and isinstance(options, Mapping)
    text = render(hf, job.template, messages, options)
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequest(
            f"the chat template writes {len(text)} characters; at most {MAX_TEXT_CHARS}", "messages"
        )
    return text
