"""The sampling parameters of a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Any

from weft.core.errors import InvalidRequest, shown
from weft.core.numbers import MAX_NUMBER, is_number

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
LEAST_DIVISOR = 1e-15
"""Logits are divided by temperature and repetition penalty, and must stay finite in float32."""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an output must have. Raises InvalidRequest unless exactly one form is given.
    Whether a schema, regex or grammar is valid is only known when the engine compiles it."""

    json: str | None = None
    """A JSON schema, as JSON text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    """EBNF; its root rule is `root`."""
    structural_tag: str | None = None
    """xgrammar's structural tag, as JSON text: free text with constrained parts."""
    around: str | None = None
    """What the output may be beside or around the form: xgrammar's structural tag, as JSON text,
    with `{"type": "form"}` in the place of the form."""
    never_first: tuple[str, ...] = ()
    """With `around`: texts that the form must not allow at its beginning, as they would be taken
    for what is beside it."""
    begin_after_token: int | None = None
    """The token that ends the reasoning: the form holds from the token after it on."""
    reasoning_token: int | None = None
    """The token that begins the reasoning. If an output begins with another one, the form holds
    from its start. None: the prompt has begun the reasoning."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "choice", _several(self.choice))
        object.__setattr__(self, "never_first", tuple(self.never_first))
        names = ("json", "regex", "grammar", "structural_tag")
        texts = [(name, text) for name in names if (text := getattr(self, name)) is not None]
        for name, text in (*texts, *(("choice", each) for each in self.choice)):
            if not isinstance(text, str):
                field = f"structured_outputs.{name}"
                raise InvalidRequest(f"{field} must be text, got {shown(text)}", field)
        forms = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
        given = sum(getattr(self, form) not in (None, False, ()) for form in forms)
        if given != 1:
            message = f"structured_outputs needs exactly one form, got {given}"
            raise InvalidRequest(message, "structured_outputs")


SPECULATIVE = ("off", "ngram", "mtp")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request.

    `temperature` 0 always takes the likeliest token. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are
    off. `seed` makes a request's tokens reproducible, whatever else is in its batch. `logprobs` is
    the number of alternatives to report beside each token of the output (None: report no
    log-probabilities), and `prompt_logprobs` the same for each token of the prompt.

    If some fields together leave no token to choose, the request is refused where that can be seen
    beforehand. Otherwise the weaker fields give way. The strongest comes first: structured outputs,
    `allowed_token_ids`, bad words of one token, `min_tokens`, other bad words.

    Raises InvalidRequest, naming the field, for a value out of range.
    """

    max_tokens: int | None = 16
    """None: as many as fit into the model's context."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    """Tokens less likely than this share of the most likely one are left out."""
    repetition_penalty: float = 1.0
    """Above 1: logits of tokens in prompt or output are divided by it (multiplied if negative)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as the token is in the output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits, by token id."""
    min_tokens: int = 0
    """Before so many, neither EOS nor a stop token can be chosen, and no stop string counts."""
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """Only these can be chosen; empty: all."""
    structured_outputs: StructuredOutputs | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculative: str | None = None
    """How the next tokens are guessed, which only changes their speed: "ngram", "mtp" or "off";
    None: the server's default."""

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            put(name, _several(getattr(self, name)))
        for name, low, high in (
            ("max_tokens", 1, MAX_NUMBER),
            ("seed", -MAX_NUMBER - 1, MAX_NUMBER),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                put(name, _int(name, getattr(self, name), low, high))
        if self.speculative not in (None, *SPECULATIVE):
            known = ", ".join(SPECULATIVE)
            message = f"speculative must be one of {known}, got {shown(self.speculative)}"
            raise InvalidRequest(message, "speculative")
        if type(self.structured_outputs) not in (StructuredOutputs, type(None)):
            message = "structured_outputs must be a StructuredOutputs of weft.core.sampling"
            given = shown(self.structured_outputs)
            raise InvalidRequest(f"{message}, got {given}", "structured_outputs")
        put("top_k", _int("top_k", self.top_k, -1, MAX_NUMBER))
        put("min_tokens", _int("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_NUMBER))
        for name, lowest, highest in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", LEAST_DIVISOR, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            above = name in ("top_p", "repetition_penalty")
            put(name, _float(name, getattr(self, name), lowest, highest, above=above))
        if self.temperature < LEAST_DIVISOR:
            put("temperature", 0.0)
        if not isinstance(biases := self.logit_bias or {}, Mapping):
            raise InvalidRequest("logit_bias must have numbers by token id", "logit_bias")
        put("logit_bias", {_token("logit_bias", t): _bias(t, b) for t, b in biases.items()})
        _check_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS)
        _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        for name in ("stop_token_ids", "allowed_token_ids"):
            put(name, tuple(_token(name, token) for token in getattr(self, name)))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check_vocab(self, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the field, if a token id is not below `vocab_size`."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            highest = max(getattr(self, name), default=-1)
            if highest >= vocab_size:
                message = f"{name} has token id {highest}, outside of [0, {vocab_size})"
                raise InvalidRequest(message, name)


def _several(value: object) -> tuple[Any, ...]:
    """The values of a field that takes one value, several, or None for none."""
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray):
        return (value,)
    return tuple(value)


def as_int(value: Any) -> int | None:
    """The value as an int, if it is an integer of any type, such as numpy's; else None."""
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def _int(name: str, value: object, low: int, high: int) -> int:
    number = as_int(value)
    if number is None:
        raise InvalidRequest(f"{name} must be an integer, got {shown(value)}", name)
    if not low <= number <= high:
        bound = f"in [{low}, {high}]" if number > high or high < MAX_NUMBER else f"at least {low}"
        raise InvalidRequest(f"{name} must be {bound}, got {shown(number)}", name)
    return number


def _token(name: str, value: object) -> int:
    return _int(name, value, 0, MAX_NUMBER)


def _check_strings(name: str, values: tuple[str, ...], max_strings: int, max_chars: int) -> None:
    if len(values) > max_strings:
        raise InvalidRequest(f"{name} has more than {max_strings} strings", name)
    if any(not isinstance(s, str) or not s for s in values):
        raise InvalidRequest(f"{name} must hold non-empty strings", name)
    if any(len(s) > max_chars for s in values):
        raise InvalidRequest(f"{name} has a string of more than {max_chars} characters", name)


def _bias(token: object, value: object) -> float:
    return _float(f"logit_bias[{token}]", value, -100.0, 100.0)


def _float(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """`above`: `low` itself is not allowed."""
    if not is_number(value):
        raise InvalidRequest(f"{name} must be a number, got {shown(value)}", name)
    if not low <= value <= high or (above and value == low):
        bound = f"above {low:g} and at most {high:g}" if above else f"in [{low:g}, {high:g}]"
        raise InvalidRequest(f"{name} must be {bound}, got {shown(value)}", name)
    return float(value)
