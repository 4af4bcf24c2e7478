"""The jobs and the answers of worker processes. All are plain data: nothing that a worker sends is
ever run or unpickled."""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Self

import msgspec

from weft.text.templates import Templates


class Material(msgspec.Struct, frozen=True, dict=True):
    """A tokenizer as a worker gets it."""

    packed: bytes
    """The JSON of the Rust tokenizer, compressed."""
    special_tokens: dict[str, str]
    """What chat templates see: `bos_token` and so on."""

    @classmethod
    def of(cls, rust_json: str, special_tokens: Mapping[str, str]) -> Self:
        return cls(zlib.compress(rust_json.encode(), 1), dict(special_tokens))

    @cached_property
    def key(self) -> str:
        """The key under which workers keep a tokenizer."""
        said = repr(sorted(self.special_tokens.items())).encode()
        return hashlib.sha256(self.packed + said).hexdigest()


# -- jobs ------------------------------------------------------------------------------------------


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Turn texts into token ids. The answer is `Ids`."""

    texts: list[str]
    add_special_tokens: bool
    seconds: list[str] = []
    """The second text of each pair; empty if the texts are no pairs."""


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Turn token ids into a text. The answer is `Text`."""

    ids: list[int]


class Chat(msgspec.Struct, frozen=True, tag=True):
    """Write a conversation by a template, and turn it into token ids. The answer is `Ids`."""

    template: str
    conversation: str
    """JSON: the messages, and the options of `weft.text.templates.template_options`."""


class LoadTokenizer(msgspec.Struct, frozen=True, tag=True):
    """Make a tokenizer of an adapter's files. The answer is `LoadedTokenizer`."""

    files: dict[str, bytes]
    base_files: dict[str, bytes]
    """The base's own, for what the adapter lacks."""
    base_class: str
    base_fingerprint: str
    folder: str
    """An empty folder for copies of the files. The caller removes it."""
    marks: tuple[str, ...]
    """Texts of which the caller wants to know whether they are one token."""


Job = Encode | Decode | Chat | LoadTokenizer


class Task(msgspec.Struct, frozen=True):
    """One job, and the CPU time that it may take."""

    job: Job
    cpu_s: float
    key: str = ""
    """The tokenizer that it is for."""
    material: Material | None = None
    """That tokenizer, where the worker may not have it yet."""


# -- answers ---------------------------------------------------------------------------------------


class Ids(msgspec.Struct, frozen=True, tag=True):
    """Token ids of each text, as 32-bit numbers."""

    packed: list[bytes]

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]]) -> Self:
        return cls([array("I", each).tobytes() for each in ids])

    def lists(self) -> list[list[int]]:
        return [array("I", each).tolist() for each in self.packed]


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str


class TokenTable(msgspec.Struct, frozen=True):
    """What outputs need of a tokenizer."""

    pieces: list[str | None]
    """By token id."""
    added: dict[int, str]
    """Tokens that are no pieces of the model's, by id."""
    special_ids: list[int]
    decoder: str
    """The JSON of the Rust decoder; empty if there is none."""
    size: int
    marks: dict[str, int]
    """The tokens of those marks that are one token."""


class LoadedTokenizer(msgspec.Struct, frozen=True, tag=True):
    """An adapter's tokenizer; `material` and `vocabulary` are None if it is the base's."""

    templates: Templates | None
    eos_ids: list[int]
    material: Material | None = None
    vocabulary: TokenTable | None = None


class Missing(msgspec.Struct, frozen=True, tag=True):
    """The worker does not have the tokenizer (any more): send the task with its material."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The job failed with an error of the tree in `weft.core.errors`."""

    kind: str
    message: str
    param: str | None


Answer = Ids | Text | LoadedTokenizer | Missing | Refused


class Answered(msgspec.Struct, frozen=True):
    answer: Answer
    worn: bool
    """Whether the worker wants to be replaced: it has done much, or has grown large."""
