"""An adapter's tokenizer in the server's process, where it only turns token ids into text. Worker
processes read its vocabulary and encode texts with it.

Its decoder is built of a few known parts, each of which takes linear time and adds at most one
character to a token. So nothing that an adapter brings can hold up others' outputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from tokenizers import decoders

from weft.core.errors import AdapterInvalid
from weft.text.reader import TokenReader, spelling_of
from weft.text.sandbox.jobs import Material, TokenTable
from weft.text.templates import Templates, template_for, widest_template

MAX_TOKENS = 1 << 20
MAX_PIECE_CHARS = 1024
_MAX_DECODERS = 8
_FILE = "tokenizer.json"


class AdapterTokenizer(TokenReader):
    """Raises AdapterInvalid for a vocabulary or a decoder that is not served."""

    def __init__(
        self,
        vocabulary: TokenTable,
        templates: Templates | None,
        eos_ids: Sequence[int],
        material: Material,
    ) -> None:
        self._vocabulary = vocabulary
        self._pieces = vocabulary.pieces
        self._templates = templates
        self._eos_ids = tuple(eos_ids)
        self._material = material
        self._decoder = plain_decoder(vocabulary.decoder)
        self._special_ids = frozenset(vocabulary.special_ids)
        if self.max_chars_per_token > MAX_PIECE_CHARS:
            _refuse(f"a token has {self.max_chars_per_token} characters, above {MAX_PIECE_CHARS}")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        pieces = [p for i in ids if i not in skipped and (p := self.piece(i)) is not None]
        return " ".join(pieces) if self._decoder is None else str(self._decoder.decode(pieces))

    def mark_id(self, mark: str) -> int | None:
        return self._vocabulary.marks.get(mark)

    def piece(self, token_id: int) -> str | None:
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else None

    def extends(self, base: TokenReader, ids: Mapping[str, int]) -> bool:
        """Whether this tokenizer has all tokens of the base, given by `ids`, under the same ids."""
        return self.spelling == base.spelling and all(self.piece(i) == t for t, i in ids.items())

    @property
    def chat_template(self) -> str | None:
        return widest_template(self._templates)

    def template_for(self, tools: object) -> str:
        assert self._templates is not None
        return template_for(self._templates, tools)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    @cached_property
    def max_chars_per_token(self) -> int:
        return max((len(piece) for piece in self._pieces if piece), default=1)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def added_tokens(self) -> Mapping[int, str]:
        return self._vocabulary.added

    @cached_property
    def spelling(self) -> str:
        return spelling_of(self._vocabulary.decoder)

    @property
    def is_portable(self) -> bool:
        return True

    @property
    def material(self) -> Material:
        return self._material


# -- decoders --------------------------------------------------------------------------------------


def _refuse(why: str) -> NoReturn:
    raise AdapterInvalid(f"{_FILE}: {why}", _FILE)


def plain_decoder(state: str) -> Any:
    """Build a Rust decoder from its JSON; None if that is empty. Raises AdapterInvalid unless it
    consists of known parts."""
    if not state:
        return None
    parts = _parts(json.loads(state))
    if len(parts) > _MAX_DECODERS:
        _refuse(f"its decoder has {len(parts)} parts; at most {_MAX_DECODERS} are served")
    made = [_decoder(part) for part in parts]
    return made[0] if len(made) == 1 else decoders.Sequence(made)


def _parts(state: Any) -> list[dict[str, Any]]:
    if not isinstance(state, dict):
        _refuse("its decoder is not an object")
    if state.get("type") != "Sequence":
        return [state]
    return [part for inner in state["decoders"] for part in _parts(inner)]


def _decoder(state: dict[str, Any]) -> Any:
    match state:
        case {"type": "ByteLevel"}:
            return decoders.ByteLevel()
        case {"type": "ByteFallback"}:
            return decoders.ByteFallback()
        case {"type": "Fuse"}:
            return decoders.Fuse()
        case {"type": "Metaspace", "replacement": str(mark)} if len(mark) == 1:
            scheme, split = state.get("prepend_scheme", "always"), state.get("split", True)
            return decoders.Metaspace(mark, scheme, split)
        case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)}:
            return decoders.WordPiece(prefix, cleanup)
        case {"type": "BPEDecoder", "suffix": str(suffix)} if suffix:
            return decoders.BPEDecoder(suffix)
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0}:
            return decoders.Strip(char, min(start, MAX_PIECE_CHARS), 0)
        # Texts must not grow: several decoders one after the other would multiply that.
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(
            new
        ) <= len(old):
            return decoders.Replace(old, new)
    shown = json.dumps(state)[:80]
    _refuse(f"its decoder {shown} is not served; known are ByteLevel, Metaspace and the like")
