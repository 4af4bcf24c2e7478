"""Text on both sides of the engine: tokenizer, detokenizer, stop strings, a request's output."""

from weft.text.adapter_tokenizers import AdapterTokenizers, OwnTokenizer
from weft.text.output import Detokenizer, OutputDelta, OutputStream, StopStrings
from weft.text.reader import TokenReader
from weft.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "AdapterTokenizers",
    "Detokenizer",
    "OutputDelta",
    "OutputStream",
    "OwnTokenizer",
    "StopStrings",
    "TokenReader",
    "Tokenizer",
    "load_tokenizer",
]
