"""Vectors of texts, and what is made of them: `/v1/embeddings`, `/score`, `/rerank` and
`/classify`."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from weft.api.generation import truncated
from weft.api.http import ERRORS, answer, body_of
from weft.api.pooling_bodies import ClassifyBody, EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from weft.api.reading import read_request
from weft.api.schemas import Prompt, texts_or_ids
from weft.api.service import Service
from weft.core.errors import InvalidRequest
from weft.core.requests import EngineRequest, Pooling
from weft.serving import Pinned
from weft.serving.embedding import Vectors, as_vectors, normalized, probabilities, shortened


class Texts(NamedTuple):
    """Texts, and the field that they came from."""

    field: str
    texts: list[str]


Work = Callable[["_Pooling", Any], Awaitable[dict[str, Any]]]


def pooling_routes(service: Service) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    def add(paths: Sequence[str], kind: type[PoolingBody], work: Work) -> None:
        for path in paths:
            router.add_api_route(
                path, _endpoint(service, kind, work), methods=["POST"], openapi_extra=body_of(kind)
            )

    add(["/v1/embeddings"], EmbeddingBody, _embed)
    add(["/score", "/v1/score"], ScoreBody, _score)
    add(["/classify", "/v1/classify"], ClassifyBody, _classify)
    add(["/rerank", "/v1/rerank", "/v2/rerank"], RerankBody, _rerank)
    return router


def _endpoint(
    service: Service, kind: type[PoolingBody], work: Work
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        body = await read_request(request, kind, service.settings)
        pinned = await service.pin(body, request.headers)
        pooling = _Pooling(service, body, pinned)
        headers = service.headers_of(pinned)
        return await answer(request, pooling.named(work(pooling, body)), pinned.release, headers)

    endpoint.__doc__ = kind.__doc__
    return endpoint


class _Pooling:
    """One request: its texts become prompts, and these become vectors."""

    def __init__(self, service: Service, body: PoolingBody, pinned: Pinned) -> None:
        self._service = service
        self._body = body
        self._pinned = pinned
        self._id = uuid.uuid4().hex
        self._num_tokens = 0

    @property
    def normalizes(self) -> bool:
        """Whether the model's folder wants vectors of length 1."""
        return self._service.settings.embedding.normalize

    async def named(self, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """The answer, with what all of them begin and end with."""
        answered = await work
        usage = {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens}
        head = {"id": f"pool-{self._id}", "created": int(time.time()), "model": self._body.model}
        return head | answered | {"usage": usage}

    async def prompts(self, given: Prompt, field: str) -> list[list[int]]:
        """The token ids of texts, or of what are ids already."""
        texts, ids = texts_or_ids(given, field)
        self._check_count(len(texts or ids), field)
        return self._truncated(ids or await self._encoded(texts, field))

    async def _encoded(
        self, texts: Sequence[str], field: str, seconds: Sequence[str] = ()
    ) -> list[list[int]]:
        body = self._body
        return await self._service.encode(
            texts,
            field,
            self._pinned.language,
            add_special_tokens=body.add_special_tokens is not False,
            any_length=body.truncate_prompt_tokens is not None,
            seconds=seconds,
        )

    def _truncated(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        keep = self._body.truncate_prompt_tokens
        return [truncated(self._service, keep, ids, 0) for ids in prompts]

    def _check_count(self, count: int, field: str) -> None:
        if count > (limit := self._service.settings.max_prompts):
            raise InvalidRequest(f"{field} has {count} texts, and may have {limit}", field)

    async def vectors(self, prompts: Mapping[str, Sequence[list[int]]]) -> list[Vectors]:
        """The vectors of the prompts of each field, as the model's folder wants them pooled, not
        normalised."""
        rule = self._service.settings.embedding
        rule.check()
        return await self._pooled(prompts, rule.pooling)

    async def _pooled(
        self, prompts: Mapping[str, Sequence[list[int]]], pooling: Pooling
    ) -> list[Vectors]:
        service = self._service
        tenant = service.settings.tenant_of(self._pinned.name)
        service.admission.check_early(tenant, sum(map(len, prompts.values())))
        requests: list[EngineRequest] = []
        for field, given in prompts.items():
            requests += service.intake.pooled(
                f"pool-{self._id}-{field}",
                given,
                pooling,
                self._pinned,
                tenant,
                prompt_field=field,
                cache_salt=service.salt(tenant, self._body.cache_salt),
            )
        self._num_tokens += sum(len(request.prompt_ids) for request in requests)
        found = as_vectors(await service.pool(requests))
        ends = np.cumsum([len(given) for given in prompts.values()])
        return np.split(found, ends[:-1])

    async def classes(self, prompts: Sequence[list[int]], field: str) -> Vectors:
        """How likely each label is for each prompt. Raises InvalidRequest for a model that does not
        classify."""
        head = self._pinned.head
        if head is None:
            raise InvalidRequest(
                f"{self._body.model!r} can't classify texts: that needs an adapter that was trained"
                " for it (SEQ_CLS)",
                "model",
            )
        (vectors,) = await self._pooled({field: prompts}, "last")
        return probabilities(head, vectors)

    async def scores(self, first: Texts, second: Texts) -> list[float]:
        """How well the texts of each pair go together: as the model says that was trained to
        classify pairs by one label, or else as alike as their vectors are."""
        head = self._pinned.head
        if head is None:
            return await self._alike(first, second)
        if head.num_labels > 1:
            message = f"{self._body.model!r} knows {head.num_labels} labels, and a score needs one"
            raise InvalidRequest(message, "model")
        self._check_count(len(second.texts), second.field)
        prompts = await self._encoded(first.texts, second.field, seconds=second.texts)
        found = await self.classes(self._truncated(prompts), second.field)
        scores: list[float] = found[:, 0].tolist()
        return scores

    async def _alike(self, first: Texts, second: Texts) -> list[float]:
        """The cosine of the angle between the vectors of each pair. A first text that all pairs
        have is computed once."""
        firsts = first.texts[:1] if len(set(first.texts)) == 1 else first.texts
        asked = (Texts(first.field, firsts), second)
        prompts = {each.field: await self.prompts(each.texts, each.field) for each in asked}
        of_first, of_second = map(normalized, await self.vectors(prompts))
        cosines: list[float] = (of_first * of_second).sum(1).tolist()
        return cosines


async def _embed(pooling: _Pooling, body: EmbeddingBody) -> dict[str, Any]:
    prompts = await pooling.prompts(body.input, "input")
    (vectors,) = await pooling.vectors({"input": prompts})
    vectors = shortened(vectors, body.dimensions)
    normalize = pooling.normalizes if body.normalize is None else body.normalize
    vectors = normalized(vectors) if normalize else vectors
    shown = [_base64(v) if body.encoding_format == "base64" else v.tolist() for v in vectors]
    data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(shown)]
    return {"object": "list", "data": data}


async def _score(pooling: _Pooling, body: ScoreBody) -> dict[str, Any]:
    first, second = body.pairs()
    scores = await pooling.scores(Texts("text_1", first), Texts("text_2", second))
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return {"object": "list", "data": data}


async def _rerank(pooling: _Pooling, body: RerankBody) -> dict[str, Any]:
    texts = body.texts()
    queries = Texts("query", [body.query] * len(texts))
    scores = await pooling.scores(queries, Texts("documents", texts))
    best = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return {"results": results}


async def _classify(pooling: _Pooling, body: ClassifyBody) -> dict[str, Any]:
    found = await pooling.classes(await pooling.prompts(body.input, "input"), "input")
    data = [
        {
            "index": i,
            "label": f"LABEL_{int(probs.argmax())}",
            "probs": probs.tolist(),
            "num_classes": len(probs),
        }
        for i, probs in enumerate(found)
    ]
    return {"object": "list", "data": data}


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
