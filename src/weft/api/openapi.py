"""What `/openapi.json` says of bodies, which routes read by themselves, and of errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str | None


class ErrorBody(BaseModel):
    """Every error, as OpenAI's API has it."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is at fault."},
    "5XX": {"model": ErrorBody, "description": "The server is at fault, or overloaded."},
}

TEXT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Successful Response",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}
"""The `responses` of routes that answer with plain text. Their response class is `Response`,
without a media type, which errors would get too."""


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body as `model`."""
    schema = model.model_json_schema()
    content = {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(node: Any, models: dict[str, Any]) -> Any:
    """The schema with references to models replaced by what they refer to."""
    if isinstance(node, list):
        return [_inlined(item, models) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(models[node["$ref"].removeprefix("#/$defs/")], models)
    return {key: _inlined(value, models) for key, value in node.items()}
