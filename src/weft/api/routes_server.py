"""Routes that generate nothing: `/v1/models`, `/health`, `/metrics`, `/version`, and `/tokenize`
and `/detokenize` as vLLM has them."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from weft.api.bodies import MAX_MESSAGES, ClosedBody, Conversation, Message, bounded
from weft.api.generation import token_text
from weft.api.http import ERRORS, TEXT, body_of, json_response, new_app
from weft.api.loop_watch import LoopWatch
from weft.api.reading import read_body
from weft.api.schemas import TokenIds
from weft.api.service import Service
from weft.core.errors import InvalidRequest, NotReady
from weft.core.version import __version__
from weft.metrics import CONTENT_TYPE
from weft.registry import ModelCard
from weft.serving import Language

PAGE, MAX_PAGE = 1000, 10_000
"""Models that are listed at a time, by default and at most."""


def _page_size(given: str | None, default: int | None) -> int | None:
    """Raises InvalidRequest."""
    if given is None:
        return default
    plain = given.isascii() and given.isdecimal() and len(given) < 10
    if not (plain and 1 <= int(given) <= MAX_PAGE):
        raise InvalidRequest(f"limit must be in [1, {MAX_PAGE}], got {given[:20]}", "limit")
    return int(given)


def server_routes(service: Service, watch: LoopWatch) -> APIRouter:
    router = APIRouter(responses=ERRORS)
    created = int(time.time())

    async def quarantined() -> set[str]:
        """The names of adapters whose requests are refused."""
        cards = service.access.adapter_cards()
        stats = await service.stats() if cards else None
        digests = stats.quarantined_adapters if stats else ()
        refused = [card.ref for card in cards if card.ref.digest in digests]
        return {name for ref in refused for name in (ref.name, ref.bare)}

    def shown(card: ModelCard, refused: set[str]) -> dict[str, Any]:
        return {
            "id": card.id,
            "object": "model",
            "created": created,
            "owned_by": "weft",
            "root": card.root,
            "parent": card.parent,
            "max_model_len": service.engine.info.max_model_len,
            "quarantined": card.id in refused,
        }

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """The base model under each of its names, then the adapters. Those that failed their check
        when they were loaded again are quarantined: their requests are refused.

        The query `limit` asks for so many of them, and `after` for those that follow an id. A
        server with a shared registry gives 1,000 at a time by default, and others give all.
        """
        query = request.query_params
        limit = _page_size(query.get("limit"), None if service.follower is None else PAGE)
        page = service.access.models(query.get("after", ""), limit)
        refused = await quarantined()
        cards = [shown(card, refused) for card in page.cards]
        more = {} if limit is None else {"has_more": page.has_more}
        return json_response({"object": "list", "data": cards, **more})

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        card = await service.card(model)
        return json_response(shown(card, await quarantined()))

    @router.get("/version")
    async def show_version() -> Response:
        service.access.need("admin")
        return json_response({"version": __version__})

    router.routes.extend(health_routes(service, watch).routes)
    if not service.settings.metrics_apart:

        @router.get("/metrics", response_class=Response, responses=TEXT)
        async def metrics() -> Response:
            """Metrics for Prometheus."""
            service.access.need("admin")
            return Response(await service.exposition(), media_type=CONTENT_TYPE)

    return router


def health_routes(service: Service, watch: LoopWatch) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """Answers 200 while the engine runs, 503 while it does not or starts again."""
        service.need_engine()
        return Response(status_code=200)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_class=Response)
    async def ready() -> Response:
        """Answers 200 while all is well, else 503 and what is wrong: the engine is down or hangs,
        its loading of adapters does, or the server itself was blocked just now. A server that
        can't reach its shared registry serves on: it answers 200, and for how long that is so."""
        troubles = [*service.engine.troubles, *watch.troubles()]
        if troubles:
            raise NotReady("; ".join(troubles))
        remark = service.follower.trouble if service.follower is not None else None
        return Response(remark, 200, media_type=None if remark is None else "text/plain")

    return router


def metrics_app(service: Service, watch: LoopWatch) -> FastAPI:
    """What is served on an address of its own, to those who run the server: metrics and health.
    It asks for no key."""
    app = new_app("Weft's metrics", openapi_url=None)
    app.state.tenant_of_key = lambda _: ""
    app.router.routes.extend(health_routes(service, watch).routes)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(await service.exposition(), media_type=CONTENT_TYPE)

    return app


# -- tokens ----------------------------------------------------------------------------------------


class TokenizeBody(ClosedBody, Conversation):
    """A text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], bounded(MAX_MESSAGES, least=1)] | None = None
    add_special_tokens: bool | None = None
    """This is for a text, where true is the default. A chat template writes its own."""
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", "prompt")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequest("add_special_tokens is for a prompt", "add_special_tokens")
        for name in ("add_generation_prompt", "continue_final_message", "tools", "documents"):
            if self.messages is None and getattr(self, name):
                raise InvalidRequest(f"{name} is for messages", name)
        if self.messages is not None:
            self.check_continuation(self.messages)


class DetokenizeBody(ClosedBody):
    model: str | None = None
    tokens: TokenIds


def tokenize_routes(service: Service) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.post("/tokenize", openapi_extra=body_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody, service.settings.max_body_bytes)
        body.check()
        language = await service.language_of(body.model)
        ids = await _encode(service, body, language)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": service.intake.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            answer["token_strs"] = await asyncio.to_thread(
                lambda: [token_text(language.tokenizer, i) for i in ids]
            )
        return json_response(answer)

    @router.post("/detokenize", openapi_extra=body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody, service.settings.max_body_bytes)
        language = await service.language_of(body.model)
        if body.tokens:
            service.intake.check_ids(body.tokens, "tokens", language)
        tenant = service.settings.tenant_of(None)
        text = await service.intake.decode(body.tokens, language, tenant)
        return json_response({"prompt": text})

    return router


async def _encode(service: Service, body: TokenizeBody, language: Language) -> list[int]:
    if body.messages is not None:
        return await service.encode_chat(
            [m.to_template(i) for i, m in enumerate(body.messages)],
            language,
            tools=[tool.to_template() for tool in body.tools or ()] or None,
            any_length=True,
            **body.template_options(),
        )
    encoded = await service.encode(
        [body.prompt or ""],
        "prompt",
        language,
        add_special_tokens=body.add_special_tokens is not False,
        any_length=True,
    )
    return encoded[0]
