"""How the model that a request is for reads and writes texts."""

from __future__ import annotations

from dataclasses import dataclass

from weft.registry import AdapterRegistry
from weft.text import AdapterTokenizers, Tokenizer


@dataclass(frozen=True, slots=True)
class Language:
    """The base model's language, or that of an adapter which brings a tokenizer, a chat template
    or tokens of its own."""

    tokenizer: Tokenizer | None
    vocab_size: int
    """Token ids that the model knows are below this."""
    eos_ids: tuple[int, ...] = ()
    """These tokens end an output, beside those of the base model."""
    takes_forms: bool = True
    """Whether the model can answer in a given form: forms are made of the base's tokens."""
    is_own: bool = False
    """Whether the chat template came with the adapter: somebody else may have written it."""


class Languages:
    """Finds the language of the base model and of each adapter."""

    def __init__(
        self, tokenizers: AdapterTokenizers, registry: AdapterRegistry, vocab_size: int
    ) -> None:
        """`vocab_size` is the base model's."""
        self._tokenizers, self._registry = tokenizers, registry
        self.base = Language(tokenizers.base, vocab_size)

    def of(self, adapter: str | None) -> Language:
        """The language that the adapter of this name has now; None stands for the base model."""
        if adapter is None:
            return self.base
        info, own = self._registry.info(adapter), self._tokenizers.get(adapter)
        vocab_size = (info.vocab_size if info is not None else 0) or self.base.vocab_size
        if own is None:
            return Language(self.base.tokenizer, vocab_size)
        return Language(
            own.tokenizer,
            vocab_size,
            tuple(i for i in own.eos_ids if i < vocab_size),
            own.extends_base,
            is_own=True,
        )
