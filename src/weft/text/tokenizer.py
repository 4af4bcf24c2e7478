"""A model's tokenizer, behind the few verbs that a server needs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.core.errors import ConfigError, InvalidRequest
from weft.text.reader import TokenReader, spelling_of
from weft.text.sandbox.jobs import Material
from weft.text.templates import (
    Templates,
    render,
    template_for,
    template_options,
    widest_template,
)


def load_tokenizer(path: str, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a local model folder or a hub id. Raises ConfigError when there is none."""
    from transformers import AutoTokenizer

    try:
        config = _plain_config(path, revision)
        given = {"config": config, "revision": revision, "trust_remote_code": False}
        return Tokenizer(AutoTokenizer.from_pretrained(path, **given))
    except Exception as error:  # of whatever kind the broken file provokes
        raise ConfigError(
            f"no tokenizer can be loaded from {path!r} ({error}); "
            "--skip-tokenizer-init serves token ids without one",
            "tokenizer",
        ) from error


def _plain_config(path: str, revision: str | None) -> Any | None:
    """The model's configuration as transformers' plain class, or None.

    Where the tokenizer's class is named, AutoTokenizer needs no more of the model than the fields
    of config.json. Left to itself, it imports the configuration's own class, and with it so much
    of torch, if that is installed, that it takes two seconds.
    """
    from transformers import PreTrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    if not get_tokenizer_config(path, revision=revision).get("tokenizer_class"):
        return None
    try:
        fields, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
    except OSError:
        return None
    return PreTrainedConfig.from_dict(fields, name_or_path=path)


class Tokenizer(TokenReader):
    """Wraps a `transformers` tokenizer. Safe to use from several threads.

    Where the Rust tokenizer lies beneath, `encode` and `decode` go straight to it: no state is
    shared between calls, and no clean-up of spaces alters what the model wrote.
    """

    def __init__(self, hf: Any, templates: Templates | None = None) -> None:
        """`templates` take the place of the tokenizer's own chat template."""
        self._hf = hf
        self._templates = templates
        self._fast: Any | None = getattr(hf, "backend_tokenizer", None)
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
            # Early conversions of Llama have the empty text for special tokens. Transformers would
            # stand this one in for all tokens that it does not know, itself among them, endlessly.
            if hf.unk_token is not None and self._fast.token_to_id(hf.unk_token) is None:
                hf.unk_token = None

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """A tokenizer from the files of a folder alone, without remote code. Raises any kind of
        error."""
        from transformers import AutoTokenizer

        return cls(
            AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        )

    def save(self, folder: Path) -> None:
        self._hf.save_pretrained(folder)

    def with_template(self, templates: Templates | None) -> Tokenizer:
        """The same tokenizer with these chat templates; with its own if that is None."""
        made = copy(self)
        made._templates = templates
        return made

    @property
    def class_name(self) -> str:
        return type(self._hf).__name__

    @cached_property
    def fingerprint(self) -> str:
        """Tokenizers that turn texts into tokens and back alike have the same one, whatever their
        chat templates."""
        rust = self._fast.to_str() if self._fast is not None else repr(self._hf.get_vocab())
        said = repr((rust, self._hf.special_tokens_map, self.eos_ids))
        return hashlib.sha256(said.encode(errors="replace")).hexdigest()

    def vocab(self) -> dict[str, int]:
        """The ids of all pieces and added tokens. It is made anew each time."""
        vocab: dict[str, int] = self._hf.get_vocab()
        return vocab

    def mark_id(self, mark: str) -> int | None:
        ids = self.encode(mark, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    def encode(
        self, text: str, add_special_tokens: bool = True, second: str | None = None
    ) -> list[int]:
        """The token ids of a text, or of a pair of texts."""
        special = add_special_tokens
        if self._fast is not None:
            ids: list[int] = self._fast.encode(text, second, add_special_tokens=special).ids
            return ids
        return list(self._hf.encode(text, second, add_special_tokens=special))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self._fast is not None:
            text: str = self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        return str(
            self._hf.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    @property
    def templates(self) -> Templates | None:
        templates: Templates | None = self._templates or self._hf.chat_template
        return templates

    @property
    def chat_template(self) -> str | None:
        return widest_template(self.templates)

    def template_for(self, tools: object) -> str:
        assert self.templates is not None
        return template_for(self.templates, tools)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Prompt ids of a conversation, by the model's chat template. `options` are those of
        `template_options`. Raises InvalidRequest."""
        given = template_options(self.chat_template, **options)
        text = render(self._hf, self.template_for(given["tools"]), messages, given)
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        eos = self._hf.eos_token_id
        return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)

    @cached_property
    def bos_id(self) -> int | None:
        bos: int | None = self._hf.bos_token_id
        return bos

    @cached_property
    def vocab_size(self) -> int:
        return len(self._hf)

    @cached_property
    def max_chars_per_token(self) -> int:
        return max(map(len, self.vocab()), default=1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        if self._fast is None:
            return frozenset(self._hf.all_special_ids)
        added = self._fast.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def piece(self, token_id: int) -> str | None:
        piece: str | None = self._hf.convert_ids_to_tokens(token_id)
        return piece

    @cached_property
    def added_tokens(self) -> Mapping[int, str]:
        return {i: token.content for i, token in self._hf.added_tokens_decoder.items()}

    @cached_property
    def decoder(self) -> str:
        """The JSON of the Rust decoder; empty if there is none."""
        state = getattr(getattr(self._fast, "decoder", None), "__getstate__", bytes)()
        return (state or b"").decode()

    @cached_property
    def spelling(self) -> str:
        return spelling_of(self.decoder)

    @property
    def is_portable(self) -> bool:
        return self._fast is not None

    @cached_property
    def material(self) -> Material:
        assert self._fast is not None
        return Material.of(self._fast.to_str(), self._hf.special_tokens_map)


def spellings(words: Iterable[str]) -> list[str]:
    """Each word as it begins a text, and as it follows a space."""
    bare = [word.lstrip() or word for word in words]
    return [text for word in bare for text in (word, " " + word)]


def bad_token_ids(
    words: Sequence[str], encoded: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word's `spellings`, for `EngineRequest.bad_token_ids`.

    Other ways to tokenize a word are not forbidden. Raises InvalidRequest if a word has no token.
    """
    for n, ids in enumerate(encoded):
        if not ids:
            raise InvalidRequest(f"bad_words: {words[n // 2]!r} has no tokens", "bad_words")
    return _shortest(set(map(tuple, encoded)))


def _shortest(sequences: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The sequences that no other one is the end of: a shorter one forbids the longer one."""
    kept: list[tuple[int, ...]] = []
    for backwards in sorted(sequence[::-1] for sequence in sequences):
        if not kept or backwards[: len(kept[-1])] != kept[-1]:
            kept.append(backwards)
    return tuple(sequence[::-1] for sequence in kept)
