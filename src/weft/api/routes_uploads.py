"""Routes for adapters that clients send, as a file or as tensors in SGLang's form."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
from pathlib import Path
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import Struct
from pydantic import BaseModel
from starlette.responses import Response

from weft.api.desk import AdapterDesk
from weft.api.http import ERRORS, json_response
from weft.api.reading import check_counts, note_unknown, read_json, receive_file
from weft.api.routes_adapters import SGLANG_ERRORS, UpdateAnswer, sglang_answer, wait_in
from weft.api.service import Service
from weft.core.adapters import AdapterInfo
from weft.core.errors import AdapterInvalid, InvalidRequest
from weft.core.files import CONFIG_FILE, MAX_BYTES, WEIGHTS_FILE
from weft.registry.contents import not_kept
from weft.registry.unpack import tar_of

MAX_TENSORS_BYTES = 64 << 20
"""How large SGLang's body may be: all of its JSON is read at once."""


class UploadAnswer(BaseModel):
    status: Literal["success"]
    lora_name: str
    digest: str
    """sha256 of the adapter's content."""


class CheckAnswer(BaseModel):
    """An adapter that could be served."""

    status: Literal["accepted"]
    lora_name: str
    digest: str
    max_rank: int
    targets: list[str]
    num_bytes: int
    """What it takes on the device."""
    conversion_error: float
    """How far the LoRA that would be served is off, for an adapter of another kind."""


class SerializedTensors(Struct):
    """What is read of SGLang's body. Only texts are made into objects at once: millions of small
    ones would hold up other requests."""

    lora_name: str
    config_dict: msgspec.Raw
    """The fields of adapter_config.json."""
    serialized_tensors: str | None = None
    """A safetensors file in base64."""
    serialized_named_tensors: list[str] | None = None
    """The same, once for each device of SGLang's server; the first is read."""
    pinned: bool = False
    load_format: str | None = None
    added_tokens_config: dict[str, msgspec.Raw] | None = None

    def files(self) -> dict[str, bytes]:
        """The adapter's files. Raises AdapterInvalid, InvalidRequest."""
        from weft.checkpoint.read import config_file  # numpy takes its time to import

        config, most = bytes(self.config_dict), MAX_BYTES[CONFIG_FILE]
        if len(config) > most:
            raise AdapterInvalid(f"config_dict: larger than {most} bytes", "config_dict")
        try:
            fields = msgspec.json.decode(config, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"config_dict is not valid: {error}", "config_dict") from None
        for name in ("load_format", "added_tokens_config"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not supported by this version", name)
        field, given = "serialized_tensors", self.serialized_tensors
        if given is None and self.serialized_named_tensors:
            field, given = "serialized_named_tensors", self.serialized_named_tensors[0]
        try:
            weights = base64.b64decode(given or "", validate=True)
        except (binascii.Error, ValueError):
            weights = b""
        if weights.startswith(b"\x80") or weights[:1] == b"(" or weights[:2] == b"PK":
            message = "is a pickle, and those are never opened here; send a safetensors file"
            raise AdapterInvalid(f"{field} {message} in base64", field)
        if len(weights) < 8:
            raise AdapterInvalid(f"{field} must be a safetensors file in base64", field)
        return {CONFIG_FILE: config_file(fields), WEIGHTS_FILE: weights}


_KNOWN = ("wait", "lora_id", *SerializedTensors.__struct_fields__)

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FILE_KINDS = ("application/octet-stream", "application/x-tar", "application/gzip")
_IN_QUERY = {name: {"type": "boolean"} for name in ("check", "pinned", "replace")}
_FILE_BODY = {
    "parameters": [{"name": n, "in": "query", "schema": s} for n, s in _IN_QUERY.items()],
    "requestBody": {"required": True, "content": dict.fromkeys(_FILE_KINDS, _BINARY)},
}
_TENSORS = {
    "type": "object",
    "required": ["lora_name", "config_dict", "serialized_tensors"],
    "properties": {
        "lora_name": {"type": "string"},
        "config_dict": {"type": "object"},
        "serialized_tensors": {"type": "string", "format": "byte"},
        "pinned": {"type": "boolean"},
    },
}
_TENSORS_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _TENSORS}}}
}


def upload_routes(service: Service, desk: AdapterDesk) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.put(
        "/v1/adapters/{name:path}",
        response_model=UploadAnswer | CheckAnswer,
        openapi_extra=_FILE_BODY,
    )
    async def upload_adapter(request: Request, name: str) -> Response:
        """Load the adapter in the body under this name: a tar of its folder, gzipped or not, or a
        safetensors file whose metadata have the text of adapter_config.json as `adapter_config`.
        What the body is shows in its first bytes. With `replace=false` in the query, a name that
        has other content is refused. With `check=true` the adapter is tried, and not loaded."""
        note_unknown(request, request.query_params, (*_IN_QUERY, "wait"), service.settings)
        pinned, replace = _flag(request, "pinned", False), _flag(request, "replace", True)

        async def receive(path: Path) -> str:
            return await receive_file(request, path, desk.max_upload_bytes)

        if _flag(request, "check", False):
            return json_response(_checked(*await desk.examine(name, receive, pinned)))
        whole, digest = await desk.upload(name, receive, replace, pinned, wait_in(request))
        return json_response({"status": "success", "lora_name": whole, "digest": digest})

    @router.post(
        "/load_lora_adapter_from_tensors",
        response_model=UpdateAnswer,
        responses=SGLANG_ERRORS,
        openapi_extra=_TENSORS_BODY,
    )
    async def load_lora_adapter_from_tensors(request: Request) -> Response:
        """SGLang's route, for a safetensors file in base64. Large adapters are better sent to
        `PUT /v1/adapters/{name}`."""

        async def load() -> str:
            service.access.need("publish")  # before the body, in which the name is
            with desk.receiving():
                content = await read_json(request, MAX_TENSORS_BYTES)
                body, fields, packed = await asyncio.to_thread(_packed, content)
            fields |= request.query_params
            note_unknown(request, fields, _KNOWN, service.settings)

            async def receive(path: Path) -> str:
                try:
                    await asyncio.to_thread(path.write_bytes, packed)
                except OSError as error:
                    raise not_kept(error) from error
                return hashlib.sha256(packed).hexdigest()

            wait = wait_in(request)  # `upload` counts what comes in by itself
            return (await desk.upload(body.lora_name, receive, False, body.pinned, wait))[0]

        return await sglang_answer(service, load())

    return router


def _checked(name: str, info: AdapterInfo) -> dict[str, Any]:
    return {
        "status": "accepted",
        "lora_name": name,
        "digest": info.digest,
        "max_rank": info.max_rank,
        "targets": list(info.targets),
        "num_bytes": info.num_bytes,
        "conversion_error": info.conversion_error,
    }


def _flag(request: Request, name: str, default: bool) -> bool:
    """What the query says of a field. Raises InvalidRequest."""
    given = request.query_params.get(name)
    if given not in (None, "true", "false"):
        raise InvalidRequest(f"{name} must be true or false", name)
    return default if given is None else given == "true"


def _packed(content: bytes) -> tuple[SerializedTensors, dict[str, Any], bytes]:
    """SGLang's body, all fields that it has, and a tar of the adapter in it."""
    check_counts(content, with_strings=True)
    try:
        fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        body = msgspec.json.decode(content, type=SerializedTensors)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid: {error}") from None
    given = {name: None if bytes(value) == b"null" else True for name, value in fields.items()}
    streams = {name: io.BytesIO(file) for name, file in body.files().items()}
    return body, given, b"".join(tar_of(streams))
