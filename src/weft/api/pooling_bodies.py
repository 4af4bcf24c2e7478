"""Bodies of requests for embeddings, scores, rankings and classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from weft.api.bodies import Known, LenientBody, StringOr, TextOr, bounded
from weft.api.schemas import HARMLESS, MAX_PROMPTS, ModelBody, Prompt
from weft.core.errors import InvalidRequest

_KNOWN: dict[str, Known] = HARMLESS | {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
    "softmax": (True,),
    "activation": (True,),
    "use_activation": (True,),
}
"""Fields of other servers that are not declared below."""


class PoolingBody(ModelBody):
    """What these requests have in common."""

    known = _KNOWN

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Only so many tokens of each text are kept, its last; -1: as many as fit."""


class EmbeddingBody(PoolingBody):
    """`POST /v1/embeddings`."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    """Only so many numbers of each vector are kept, its first."""
    normalize: bool | None = None
    """Whether vectors get the length 1; by default as the model's folder says."""


class ClassifyBody(PoolingBody):
    """`POST /classify`, by an adapter that was trained for it."""

    input: Prompt


_Texts = TextOr[Annotated[list[str], bounded(MAX_PROMPTS, least=1)]]


class ScoreBody(PoolingBody):
    """`POST /score`: how alike two texts are, or one text and each of several."""

    text_1: _Texts
    text_2: _Texts

    def pairs(self) -> tuple[list[str], list[str]]:
        """The first and the second text of each pair. Raises InvalidRequest."""
        first, second = _listed(self.text_1), _listed(self.text_2)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            message = f"text_1 has {len(first)} texts, which must be 1 or as many as text_2 has"
            raise InvalidRequest(message, "text_1")
        return first, second


class Document(LenientBody):
    text: str


class RerankBody(PoolingBody):
    """`POST /rerank`, as Cohere's and Jina's clients send it."""

    known = _KNOWN | {
        "max_tokens_per_doc": (),
        "max_chunks_per_doc": (),
        "rank_fields": (["text"],),
    }

    query: str
    documents: Annotated[list[StringOr[str, Document]], bounded(MAX_PROMPTS, least=1)]
    top_n: int | None = Field(None, ge=0)
    """How many of the best documents the answer has; 0 and null: all."""
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


def _listed(texts: Any) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)
