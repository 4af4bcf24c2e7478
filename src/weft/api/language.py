"""How the model that a request is for reads and writes texts."""

from __future__ import annotations

from dataclasses import dataclass

from weft.api.dialect import Dialect
from weft.api.settings import ApiSettings
from weft.registry import AdapterRegistry
from weft.text import AdapterTokenizers, Tokenizer


@dataclass(frozen=True, slots=True)
class Language:
    """The base's, or that of an adapter with a tokenizer, a chat template or tokens of its own."""

    tokenizer: Tokenizer | None
    dialect: Dialect
    vocab_size: int
    """Token ids that the model knows are below it."""
    eos_ids: tuple[int, ...] = ()
    """They end an output beside those of the model."""
    takes_forms: bool = True
    """Whether structured outputs can be had: they are made of the base's tokens."""
    is_own: bool = False
    """Whether its chat template is not the base's: somebody else may have written it."""


class Languages:
    """Languages by the names of adapters."""

    def __init__(
        self,
        tokenizers: AdapterTokenizers,
        registry: AdapterRegistry,
        settings: ApiSettings,
        vocab_size: int,
    ) -> None:
        """`vocab_size`: the base's."""
        self._tokenizers, self._registry, self._settings = tokenizers, registry, settings
        self.base = Language(tokenizers.base, Dialect.of(tokenizers.base, settings), vocab_size)

    def of(self, adapter: str | None) -> Language:
        """As of now, of the adapter of that name; None: the base's."""
        if adapter is None:
            return self.base
        info, own = self._registry.info(adapter), self._tokenizers.get(adapter)
        vocab_size = (info.vocab_size if info is not None else 0) or self.base.vocab_size
        if own is None:
            return Language(self.base.tokenizer, self.base.dialect, vocab_size)
        return Language(
            own.tokenizer,
            Dialect.of(own.tokenizer, self._settings),
            vocab_size,
            tuple(i for i in own.eos_ids if i < vocab_size),
            own.extends_base,
            is_own=True,
        )
