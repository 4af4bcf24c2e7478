"""Text on both sides of the engine: tokenizer, detokenizer, stop strings, a request's output."""

from weft.text.bad_words import bad_token_ids
from weft.text.detokenizer import Detokenizer
from weft.text.output import OutputDelta, OutputStream
from weft.text.own import AdapterTokenizers, OwnTokenizer
from weft.text.stops import StopStrings
from weft.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "AdapterTokenizers",
    "Detokenizer",
    "OutputDelta",
    "OutputStream",
    "OwnTokenizer",
    "StopStrings",
    "Tokenizer",
    "bad_token_ids",
    "load_tokenizer",
]
