"""The tokenizer as forms see it: what each token spells, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Self

from weft.schedule.masks import words_of

if TYPE_CHECKING:
    from weft.text import Tokenizer


class Vocabulary:
    """The tokenizer as xgrammar sees it, and the masks that need no grammar.

    Special tokens are spelled with a byte that no text has: a form can name them, but never matches
    them by chance, since they don't show in the output. Rows of the model without a token are
    never allowed.
    """

    def __init__(self, spelled: Sequence[bytes], eos_ids: Sequence[int]) -> None:
        self.spelled = spelled
        self.size = size = len(spelled)
        self.eos_ids = eos_ids
        self.before = words_of([i for i in range(size) if spelled[i]], size)
        """Before the form binds: all but EOS."""
        self.eos = words_of(eos_ids, size)
        self.any = self.before | self.eos

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> Self:
        """The vocabulary of a tokenizer, for a model with `size` tokens."""
        spelled = [tokenizer.token_bytes(i) for i in range(size)]
        for i in tokenizer.special_ids:
            if i < size:
                spelled[i] = b"\xff" + spelled[i]
        for i in eos_ids:
            spelled[i] = b""
        return cls(spelled, eos_ids)

    @cached_property
    def id_of_special(self) -> dict[str, int]:
        return {t[1:].decode(): i for i, t in enumerate(self.spelled) if t[:1] == b"\xff"}
