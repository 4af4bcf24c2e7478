"""The part of a tokenizer that outputs need: from token ids to text."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from weft.text.sandbox.jobs import Material

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"
"""How sentencepiece writes a space."""


class TokenReader(ABC):
    """Turns token ids into text, in time that grows with their number alone."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`; ids without a token (rows that pad the vocabulary) have none."""

    @abstractmethod
    def mark_id(self, mark: str) -> int | None:
        """The id of this mark of calls or reasoning; None if it is not a single token."""

    @abstractmethod
    def piece(self, token_id: int) -> str | None:
        """How the vocabulary spells this token."""

    @property
    @abstractmethod
    def chat_template(self) -> str | None:
        """The text of the chat template, or None. Of several, it is that for tools, if any."""

    @abstractmethod
    def template_for(self, tools: object) -> str:
        """The chat template for a conversation with these tools, or without any."""

    @property
    @abstractmethod
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids the tokenizer can produce; a model's own vocabulary may be padded beyond it."""

    @property
    @abstractmethod
    def max_chars_per_token(self) -> int: ...

    @property
    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out."""

    @property
    @abstractmethod
    def added_tokens(self) -> Mapping[int, str]:
        """Tokens added to the tokenizer's own vocabulary, by id."""

    @property
    @abstractmethod
    def spelling(self) -> str:
        """How pieces spell bytes: "bytes" (byte-level BPE), "spaces" (sentencepiece) or "other"."""

    @property
    @abstractmethod
    def is_portable(self) -> bool:
        """Whether worker processes can run this tokenizer."""

    @property
    @abstractmethod
    def material(self) -> Material:
        """The tokenizer as worker processes get it, if it is portable. This may be slow."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, also when they are part of a character only."""
        if token_id in self.added_tokens:
            return self.added_tokens[token_id].encode()
        piece = self.piece(token_id)
        if piece is None:
            return b""
        if self.spelling == "bytes" and all(c in _byte_of_char for c in piece):
            return bytes(_byte_of_char[c] for c in piece)
        if self.spelling == "spaces":
            byte = _BYTE_PIECE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()
        return self.decode([token_id]).encode()


def spelling_of(decoder: str) -> str:
    """`TokenReader.spelling` by the JSON of a Rust decoder."""
    if '"ByteLevel"' in decoder:
        return "bytes"
    return "spaces" if '"Metaspace"' in decoder or SPACE in decoder else "other"


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE writes bytes: printable ones are themselves, the others follow from U+0100
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_byte_of_char = _byte_alphabet()
