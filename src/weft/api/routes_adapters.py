"""Routes that load and unload adapters, in the forms of vLLM, SGLang and Dynamo."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse, Response

from weft.api.bodies import OpenBody, Take, ignored_fields
from weft.api.desk import AdapterDesk
from weft.api.http import ERRORS, TEXT, body_of, described, json_response, log_full
from weft.api.reading import note_unknown, read_request
from weft.api.service import Service
from weft.api.settings import ApiSettings
from weft.core.errors import AdapterPathRefused, InvalidRequest, WeftError
from weft.core.stats import EngineStats
from weft.registry import AdapterCard
from weft.serving.releases import WAITS, Wait

Tier = Literal["device", "host", "disk"]


class UnloadBody(OpenBody):
    """Controllers send more than is known here."""

    known = {"lora_id": Take.SILENTLY, "lora_int_id": Take.SILENTLY}  # noqa: RUF012

    lora_name: str = Field(min_length=1)
    wait: Wait = "here"
    """What the answer to a change of a shared registry waits for: `commit`, that it can't be lost;
    `here`, that this server does what it says; `all`, that all servers do."""


class LoadBody(UnloadBody):
    lora_path: str = Field(min_length=1)
    """A folder, or the Hugging Face hub: `org/name[@revision]`, with or without `hf://`."""
    load_inplace: bool = False
    """Whether other content under this name is replaced."""
    pinned: bool = False
    """Whether the adapter stays on the device while nobody uses it."""
    is_3d_lora_weight: bool = False

    def check(self) -> None:
        if self.is_3d_lora_weight:
            raise InvalidRequest(
                "is_3d_lora_weight is not supported by this version", "is_3d_lora_weight"
            )


class UriSource(OpenBody):
    uri: str = Field(min_length=1)
    """`file:///folder` or `hf://org/name[@revision]`."""


class SourceBody(UnloadBody):
    source: UriSource
    pinned: bool = False

    def ignored(self, strict: bool) -> list[str]:
        beside = ignored_fields(self.source.model_extra, {}, "source.", strict)
        return super().ignored(strict) + beside

    def check(self) -> None:
        if "://" not in self.source.uri:
            raise AdapterPathRefused("a URI without a scheme is not served", "source.uri")


class UpdateAnswer(BaseModel):
    """What SGLang answers, whether or not it succeeded."""

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, str]
    """The path of each name."""


class ShownAdapter(BaseModel):
    """One adapter of `GET /v1/loras`."""

    name: str
    version: int
    """Counts the contents that the name has had."""
    digest: str
    """sha256 of the content."""
    path: str
    rank: int
    targets: list[str]
    """Projections that it changes."""
    conversion_error: float
    """How far the LoRA that is served for an adapter of another kind is off in its worst
    projection, as a relative Frobenius norm. It is 0 for a LoRA."""
    invocation_token_ids: list[int]
    """An activated LoRA is active from the last place of these tokens in the prompt on. If the
    list is empty, the adapter is active everywhere."""
    bytes: int
    pinned: bool
    tier: Tier | None
    """Where the adapter is now, or null when the engine does not answer."""
    quarantined: bool
    """Whether it failed its check when it was loaded again, so that its requests are refused."""


class AdapterList(BaseModel):
    status: Literal["success"]
    count: int
    loras: dict[str, ShownAdapter]


class AdapterDone(BaseModel):
    """What Dynamo answers to a load or unload that succeeded."""

    status: Literal["success"]
    message: str
    lora_name: str


SGLANG_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": described(UpdateAnswer, "It can't be loaded or unloaded."),
    "5XX": described(UpdateAnswer, "The engine does not answer."),
}
"""The `responses` of SGLang's routes."""


def adapter_routes(service: Service, desk: AdapterDesk) -> APIRouter:
    router = APIRouter(responses=ERRORS)
    vllm = _vllm_routes(desk, service.settings)
    for dialect in (vllm, _sglang_routes(service, desk), _dynamo_routes(service, desk)):
        router.routes.extend(dialect.routes)
    return router


def _vllm_routes(desk: AdapterDesk, settings: ApiSettings) -> APIRouter:
    router = APIRouter(default_response_class=Response, responses=ERRORS | TEXT)

    @router.post("/v1/load_lora_adapter", openapi_extra=body_of(LoadBody))
    async def load_lora_adapter(request: Request) -> Response:
        name = await _load(desk, request, settings)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", openapi_extra=body_of(UnloadBody))
    async def unload_lora_adapter(request: Request) -> Response:
        """Answers when the adapter's running requests have ended."""
        name = await _unload(desk, request, settings)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return router


def _sglang_routes(service: Service, desk: AdapterDesk) -> APIRouter:
    router = APIRouter(responses=SGLANG_ERRORS)
    settings = service.settings

    @router.post("/load_lora_adapter", response_model=UpdateAnswer, openapi_extra=body_of(LoadBody))
    async def load_lora_adapter(request: Request) -> Response:
        return await sglang_answer(service, _load(desk, request, settings))

    @router.post(
        "/unload_lora_adapter", response_model=UpdateAnswer, openapi_extra=body_of(UnloadBody)
    )
    async def unload_lora_adapter(request: Request) -> Response:
        """Answers when the adapter's running requests have ended."""
        return await sglang_answer(service, _unload(desk, request, settings))

    return router


async def sglang_answer(service: Service, work: Coroutine[Any, Any, str]) -> Response:
    """What SGLang answers to a change, whether or not it succeeds."""
    status, message, headers = 200, None, None
    try:
        await work
    except WeftError as error:
        log_full(error)
        status, message, headers = error.status, error.message, error.headers
    paths = {card.ref.name: card.path for card in service.access.adapter_cards()}
    shown = UpdateAnswer(success=message is None, error_message=message, loaded_adapters=paths)
    return json_response(shown.model_dump(), status, headers)


def _dynamo_routes(service: Service, desk: AdapterDesk) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.get("/v1/loras", response_model=AdapterList)
    async def list_adapters() -> Response:
        """The adapters that are served, with what is known of them."""
        where = _Where(await service.stats())
        shown = {c.ref.name: _shown(c, where).model_dump() for c in service.access.adapter_cards()}
        return json_response({"status": "success", "count": len(shown), "loras": shown})

    @router.post("/v1/loras", response_model=AdapterDone, openapi_extra=body_of(SourceBody))
    async def add_adapter(request: Request) -> Response:
        body = await read_request(request, SourceBody, service.settings)
        body.check()
        try:
            name = await desk.load(body.lora_name, body.source.uri, False, body.pinned, body.wait)
        except WeftError as error:
            if error.param == "lora_path":
                error.param = "source.uri"
            raise
        return _done("loaded", name)

    @router.delete("/v1/loras/{name:path}", response_model=AdapterDone)
    async def remove_adapter(name: str, request: Request) -> Response:
        """Answers when the adapter's running requests have ended. `wait` may be in the query."""
        note_unknown(request, request.query_params, ("wait",), service.settings)
        return _done("unloaded", await desk.unload(name, wait_in(request)))

    return router


async def _load(desk: AdapterDesk, request: Request, settings: ApiSettings) -> str:
    body = await read_request(request, LoadBody, settings)
    body.check()
    return await desk.load(
        body.lora_name, body.lora_path, body.load_inplace, body.pinned, body.wait
    )


async def _unload(desk: AdapterDesk, request: Request, settings: ApiSettings) -> str:
    body = await read_request(request, UnloadBody, settings)
    return await desk.unload(body.lora_name, body.wait)


def wait_in(request: Request) -> Wait:
    """The scope in a request's query. Raises InvalidRequest."""
    given = request.query_params.get("wait", "here")
    for scope in WAITS:
        if given == scope:
            return scope
    raise InvalidRequest(f"wait must be one of {', '.join(WAITS)}", "wait")


class _Where:
    """Where adapters are, by their digests: there may be tens of thousands of them."""

    def __init__(self, stats: EngineStats | None) -> None:
        """`stats` is None when the engine does not answer."""
        self._is_known = stats is not None
        self._tiers: dict[str, Tier] = {}
        self.quarantined: frozenset[str] = frozenset()
        if stats is not None:
            self._tiers |= dict.fromkeys(stats.host_adapters, "host")
            self._tiers |= dict.fromkeys(stats.resident_adapters, "device")
            self.quarantined = frozenset(stats.quarantined_adapters)

    def tier(self, digest: str) -> Tier | None:
        return self._tiers.get(digest, "disk") if self._is_known else None


def _shown(card: AdapterCard, where: _Where) -> ShownAdapter:
    return ShownAdapter(
        name=card.ref.name,
        version=card.ref.version,
        digest=card.ref.digest,
        path=card.path,
        rank=card.info.max_rank,
        targets=list(card.info.targets),
        conversion_error=card.info.conversion_error,
        invocation_token_ids=list(card.info.invocation_token_ids),
        bytes=card.info.num_bytes,
        pinned=card.pinned,
        tier=where.tier(card.ref.digest),
        quarantined=card.ref.digest in where.quarantined,
    )


def _done(what: str, name: str) -> Response:
    done = AdapterDone(
        status="success", message=f"LoRA adapter '{name}' {what} successfully", lora_name=name
    )
    return json_response(done.model_dump())
