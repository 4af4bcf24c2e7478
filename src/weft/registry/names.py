"""Validates names of adapters, normalises them, and finds names that look the same.

The table has what a reader takes for a Latin letter or an ASCII sign in common fonts: Cyrillic,
Greek and Armenian letters, Latin ones from outside ASCII, and dashes. It is a small part of
Unicode's (UTS 39); no library for it is both kept up and small.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import cast

from weft.core.errors import InvalidRequest

MAX_NAME_LENGTH = 200
"""Characters."""
_LOOKS = {
    "a": "аɑα", "b": "Ьƅ", "c": "сϲⅽ", "d": "ԁɗ", "e": "еҽ℮", "g": "ɡց", "h": "һհ", "i": "іıɩι",
    "j": "јϳ", "k": "кκĸ", "l": "ӏɭǀ∣", "m": "м", "n": "ոռ", "o": "оοσօ", "p": "рρ", "q": "ԛգ",
    "r": "гᴦ", "s": "ѕƽ", "u": "υսʋ", "v": "νѵ", "w": "ԝѡա", "x": "хχ", "y": "уүγʏ", "z": "ᴢ",
    "A": "АΑ", "B": "ВΒ", "C": "СϹ", "D": "Ꭰ", "E": "ЕΕ", "F": "Ϝ", "G": "Ԍ", "H": "НΗ", "I": "ІΙӀ",
    "J": "ЈͿ", "K": "КΚ", "L": "Լ", "M": "МΜϺ", "N": "Ν", "O": "ОΟՕ", "P": "РΡ", "Q": "Ԛ",
    "S": "ЅՏ", "T": "ТΤ", "U": "Ս", "V": "Ѵ", "W": "Ԝ", "X": "ХΧ", "Y": "УΥҮ", "Z": "Ζ",
    "3": "ЗӠƷ", "6": "б", "-": "‐‑‒–—―−⁃", "/": "⁄∕╱", ".": "․", ":": "ːˑ։׃∶", "_": "ˍ",
}  # fmt: skip
_IGNORED = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
"""Printable, and seen as nothing; variation selectors are too."""
_TABLE = {ord(char): ascii for ascii, chars in _LOOKS.items() for char in chars}
_TABLE |= dict.fromkeys([*map(ord, _IGNORED), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)], "")


def one_form(name: str) -> str:
    """The form of Unicode, NFKC, in which a name is kept and looked up. Raises InvalidRequest for
    what is no text."""
    if not isinstance(cast(object, name), str):
        raise InvalidRequest(f"lora_name must be a text, got {name!r:.100}", "lora_name")
    return name if name.isascii() else unicodedata.normalize("NFKC", name)


def appearance(name: str) -> str:
    """A key that is equal for names that look alike; names in ASCII all differ."""
    return name if name.isascii() else one_form(name.translate(_TABLE))


def namespace_of(name: str) -> str:
    """The part of a name before its first "/"; "" without one."""
    namespace, slash, _ = name.partition("/")
    return namespace if slash else ""


def check_name(name: str) -> None:
    """Raises InvalidRequest unless a name is safe in URLs, labels, logs and paths."""
    if not isinstance(cast(object, name), str):
        why = f"must be a text, got {name!r:.100}"
    elif not name:
        why = "must not be empty"
    elif len(name) > MAX_NAME_LENGTH:
        why = f"must not be longer than {MAX_NAME_LENGTH} characters"
    elif not name.isprintable():
        why = "must not hold control characters"
    elif name != name.strip():
        why = "must not begin or end with a space"
    elif "," in name or ".." in name or name[0] in "/\\":
        why = "must not hold ',' or '..', nor begin with '/' or '\\'"
    elif name != one_form(name):
        why = "must be in Unicode's form NFKC"
    else:
        return
    raise InvalidRequest(f"lora_name {why}", "lora_name")


def check_prefix(name: str, bases: Iterable[str]) -> None:
    """Raises InvalidRequest for a name that could be read as `base:adapter`."""
    for base in bases:
        if name.startswith(f"{base}:"):
            why = f"must not begin with '{base}:', as base:adapter names an adapter"
            raise InvalidRequest(f"lora_name {why}", "lora_name")
