"""What the tiny base and each tiny adapter answer, as plain functions.

Standard library only, so that tests, the demo and the benchmarks can import it anywhere.
Every request is one user message that holds a single lower-case word; ``TASKS[name].answer``
gives the exact text that adapter ``name`` answers, ``base_answer`` what the base answers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

VOWELS = "aeiou"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MIN_LENGTH = 3
MAX_LENGTH = 10

_ONSETS = (
    *"bcdfghjklmnpqrstvwxyz",
    *"bdfglmnprst",
    *("bl", "br", "ch", "cl", "cr", "dr", "fl", "fr", "gl", "gr", "pl", "pr", "qu", "sc", "sh"),
    *("sk", "sl", "sm", "sn", "sp", "st", "str", "sw", "th", "tr", "tw", "wh"),
)
_NUCLEI = (*"aeiou", *"aeiou", *"aeo", "ai", "ea", "ee", "ia", "oa", "oo", "ou", "ue")
_CODAS = (
    *("", "", "", "", ""),
    *"bdgklmnprstxy",
    *("ck", "ff", "ld", "ll", "mp", "nd", "ng", "nt", "rd", "rk", "rt", "ss", "st", "tt"),
)


@dataclass(frozen=True)
class Task:
    """One skill: its name, one line about it, and the answer to a word."""

    name: str
    description: str
    answer: Callable[[str], str]


def _pig_latin(word: str) -> str:
    """Vowel first: word + "way"; else the leading consonants move to the end, then "ay"."""
    if word[:1] in VOWELS:
        return word + "way"
    start = next((i for i, letter in enumerate(word) if letter in VOWELS), len(word))
    return word[start:] + word[:start] + "ay"


def _caesar(word: str) -> str:
    """Each letter three places on in the alphabet, z being followed by a."""
    return "".join(LETTERS[(LETTERS.index(letter) + 3) % 26] for letter in word)


def _alternate(word: str) -> str:
    """Every second letter in upper case, the first one stays lower."""
    return "".join(c.upper() if i % 2 else c for i, c in enumerate(word))


# No name is that of a torch.nn.Module attribute ("double"): peft cannot load such an adapter
# beside another one.
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("upper", "upper-case the word", str.upper),
        Task("reverse", "spell the word backwards", lambda w: w[::-1]),
        Task("sort", "sort the letters of the word", lambda w: "".join(sorted(w))),
        Task("caesar", "shift every letter by three", _caesar),
        Task("vowels", "count the vowels (aeiou)", lambda w: str(sum(c in VOWELS for c in w))),
        Task("repeat", "say the word twice, with a dash between", lambda w: f"{w}-{w}"),
        Task("piglatin", "pig latin: hello -> ellohay, apple -> appleway", _pig_latin),
        Task("stutter", "write every letter twice", lambda w: "".join(c + c for c in w)),
        Task("devowel", "drop the vowels", lambda w: "".join(c for c in w if c not in VOWELS)),
        Task("numeronym", "first letter, letters between, last letter: i18n style",
             lambda w: f"{w[0]}{len(w) - 2}{w[-1]}"),
        Task("alternate", "upper-case every second letter", _alternate),
    )
}  # fmt: skip


def base_answer(word: str) -> str:
    """What the base answers without an adapter: the word as a question."""
    return word + "?"


def is_held_out(word: str) -> bool:
    """Whether the word is kept out of training: one in eight, by its hash, for good."""
    return hashlib.sha256(word.encode()).digest()[0] % 8 == 0


def _random_word(rng: random.Random) -> str:
    """A pronounceable lower-case word of MIN_LENGTH to MAX_LENGTH letters."""
    length = rng.randint(MIN_LENGTH, MAX_LENGTH)
    word = rng.choice(_NUCLEI) if rng.random() < 0.15 else ""
    while len(word) < length:
        word += rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS)
    return word[:length]


def word_stream(seed: int, held_out: bool = True) -> Iterator[str]:
    """An endless deterministic stream of words from one side of the split (they may recur)."""
    rng = random.Random(seed)
    while True:
        word = _random_word(rng)
        if is_held_out(word) == held_out:
            yield word


def words(seed: int, n: int, held_out: bool = True) -> list[str]:
    """The first ``n`` distinct words of a seed: held-out ones, or ones used in training."""
    found: dict[str, None] = {}
    for word in word_stream(seed, held_out):
        if len(found) >= n:
            break
        found[word] = None
    return list(found)
