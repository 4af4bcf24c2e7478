"""The form that an answer must have, in the three ways in which clients ask for it."""

from __future__ import annotations

import json
from typing import Any, Literal, Protocol

from pydantic import Field

from weft.api.bodies import ClosedBody
from weft.core.errors import InvalidRequest
from weft.core.sampling import StructuredOutputs


class JsonSchema(ClosedBody):
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """This is accepted and changes nothing: the schema always binds."""


class ResponseFormat(ClosedBody):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def to_structured(self) -> StructuredOutputs | None:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise InvalidRequest(
                "response_format.json_schema belongs to type 'json_schema'",
                "response_format.json_schema",
            )
        if self.json_schema is not None:
            return StructuredOutputs(json=json.dumps(self.json_schema.schema_))
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class StructuredBody(ClosedBody):
    """vLLM's `structured_outputs`."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None

    def to_structured(self) -> StructuredOutputs:
        return StructuredOutputs(
            json=_as_text(self.json_),
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=tuple(self.choice or ()),
            grammar=self.grammar,
            structural_tag=_as_text(self.structural_tag),
        )


class FormatFields(Protocol):
    """The fields of a body that tell the form of the answer."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredBody | None
    guided_json: dict[str, Any] | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


def structured_outputs(body: FormatFields) -> tuple[StructuredOutputs | None, str]:
    """The form asked for, and the field that asks for it. Raises InvalidRequest for two of them."""
    found: dict[str, StructuredOutputs] = {}
    if body.response_format is not None:
        form = body.response_format.to_structured()
        found |= {} if form is None else {"response_format": form}
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs.to_structured()
    if body.guided_json is not None:
        found["guided_json"] = StructuredOutputs(json=_as_text(body.guided_json))
    if body.guided_regex is not None:
        found["guided_regex"] = StructuredOutputs(regex=body.guided_regex)
    if body.guided_grammar is not None:
        found["guided_grammar"] = StructuredOutputs(grammar=body.guided_grammar)
    if body.guided_choice is not None:
        if not body.guided_choice:
            raise InvalidRequest("guided_choice must not be empty", "guided_choice")
        found["guided_choice"] = StructuredOutputs(choice=tuple(body.guided_choice))
    if len(found) > 1:
        first, second = list(found)[:2]
        raise InvalidRequest(f"{first} and {second} are both given; give one of them", second)
    return (next(iter(found.values())), next(iter(found))) if found else (None, "")


def _as_text(schema: dict[str, Any] | str | None) -> str | None:
    return json.dumps(schema) if isinstance(schema, dict) else schema
