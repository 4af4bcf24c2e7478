"""A model's tokenizer, behind the few verbs that a server needs."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.core.errors import ConfigError, InvalidRequest

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""How sentencepiece writes a space."""


def load_tokenizer(path: str, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a local model folder or a hub id. Raises ConfigError when there is none."""
    from transformers import AutoTokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(path, revision=revision))
    except Exception as error:  # of whatever kind the broken file provokes
        raise ConfigError(
            f"no tokenizer can be loaded from {path!r} ({error}); "
            "--skip-tokenizer-init serves token ids without one",
            "tokenizer",
        ) from error


class Tokenizer:
    """Wraps a `transformers` tokenizer. Safe to use from several threads.

    Where the Rust tokenizer lies beneath, `encode` and `decode` go straight to it: no state is
    shared between calls, and no clean-up of spaces alters what the model wrote.
    """

    def __init__(self, hf: Any, template: str | None = None) -> None:
        """`template` takes the place of the tokenizer's own chat template."""
        self._hf = hf
        self._template = template
        self._fast: Any | None = getattr(hf, "backend_tokenizer", None)
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()

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

    def with_template(self, template: str | None) -> Tokenizer:
        """The same tokenizer with this chat template; with its own if that is None."""
        return Tokenizer(self._hf, template)

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

    def id_of(self, token: str) -> int | None:
        found: int | None = self._hf.get_vocab().get(token)
        return found

    def extends(self, other: Tokenizer) -> bool:
        """Whether all tokens of the other are in it, under the same ids."""
        own = self._hf.get_vocab()
        return self._decoder == other._decoder and all(
            own.get(token) == i for token, i in other._hf.get_vocab().items()
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self._fast is not None:
            ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return list(self._hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`; ids without a token (rows that pad the vocabulary) have none."""
        if self._fast is not None:
            text: str = self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        return str(
            self._hf.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, or None. The one for tools comes before the default."""
        template = self._template or self._hf.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return template or None

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Prompt ids of a conversation, by the model's chat template.

        `tools` are functions in OpenAI's form. With `continue_final_message` the prompt ends
        inside the last message, which the output continues. Arguments of earlier calls may be
        JSON text: templates get what it stands for.

        Raises InvalidRequest when the model has no template, the template refuses, or it doesn't
        show tools.
        """
        kwargs = dict(template_kwargs or {})
        if reserved := sorted(self._reserved_kwargs & kwargs.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs may not hold {reserved[0]!r}", "chat_template_kwargs"
            )
        template = self.chat_template
        if template is None:
            raise InvalidRequest("this model has no chat template", "messages")
        if tools and not re.search(r"\btools\b", template):
            raise InvalidRequest("this model's chat template takes no tools", "tools")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        kwargs |= {
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        return self.encode(self._render(messages, kwargs), add_special_tokens=False)

    @cached_property
    def _reserved_kwargs(self) -> set[str]:
        """What `chat` gives to templates itself, and what is for transformers, not for them."""
        return {"messages", *inspect.signature(self._hf.apply_chat_template).parameters}

    def _render(self, messages: Sequence[Mapping[str, Any]], kwargs: dict[str, Any]) -> str:
        try:
            return str(
                self._hf.apply_chat_template(
                    [_with_parsed_arguments(m) for m in messages],
                    chat_template=self._template,
                    tokenize=False,
                    **kwargs,
                )
            )
        except Exception as error:  # templates raise whatever they like
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", "messages"
            ) from error

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        eos = self._hf.eos_token_id
        return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)

    @cached_property
    def vocab_size(self) -> int:
        """Ids the tokenizer can produce; a model's own vocabulary may be padded beyond it."""
        return len(self._hf)

    @cached_property
    def max_chars_per_token(self) -> int:
        return max((len(piece) for piece in self._hf.get_vocab()), default=1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out."""
        if self._fast is None:
            return frozenset(self._hf.all_special_ids)
        added = self._fast.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, also when they are part of a character only."""
        if token_id in self._added_tokens:
            return self._added_tokens[token_id].encode()
        piece = self._hf.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self._decoder == "bytes" and all(c in _byte_of_char for c in piece):
            return bytes(_byte_of_char[c] for c in piece)
        if self._decoder == "spaces":
            byte = _BYTE_PIECE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()
        return self.decode([token_id]).encode()

    @cached_property
    def _added_tokens(self) -> dict[int, str]:
        return {i: token.content for i, token in self._hf.added_tokens_decoder.items()}

    @cached_property
    def _decoder(self) -> str:
        """How pieces spell bytes: "bytes" (byte-level BPE), "spaces" (sentencepiece) or "other"."""
        state: bytes = getattr(getattr(self._fast, "decoder", None), "__getstate__", bytes)() or b""
        if b'"ByteLevel"' in state:
            return "bytes"
        return "spaces" if b'"Metaspace"' in state or _SPACE.encode() in state else "other"


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: the arguments of its calls are objects, not JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_with_parsed_call(call) for call in calls]}


def _with_parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE writes bytes: printable ones are themselves, the others follow from U+0100
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_byte_of_char = _byte_alphabet()


def bad_token_ids(tokenizer: Tokenizer | None, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word as it begins a text and as it follows a space, for
    `EngineRequest.bad_token_ids`.

    Other ways to tokenize a word are not forbidden. Raises InvalidRequest if there is no
    tokenizer, or no token in a word.
    """
    words = list(words)
    if not words:
        return ()
    if tokenizer is None:
        raise InvalidRequest("bad_words need a tokenizer, and none is loaded", "bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        found = [
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, " " + bare)
        ]
        if not all(found):
            raise InvalidRequest(f"bad_words: {word!r} has no tokens", "bad_words")
        sequences |= dict.fromkeys(found)
    return _shortest(sequences)


def _shortest(sequences: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The sequences that end in no other one: a longer one is forbidden by the shorter."""
    kept: list[tuple[int, ...]] = []
    for backwards in sorted(sequence[::-1] for sequence in sequences):
        if not kept or backwards[: len(kept[-1])] != kept[-1]:
            kept.append(backwards)
    return tuple(sequence[::-1] for sequence in kept)
