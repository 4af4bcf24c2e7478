"""What bodies of requests are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from weft.core.errors import InvalidRequest

T = TypeVar("T")


class OpenBody(BaseModel):
    """Takes any field; `refuse_extra` says which are meant."""

    model_config = ConfigDict(extra="allow", strict=True)


class ClosedBody(BaseModel):
    """Takes the fields that are declared here, and no other."""

    model_config = ConfigDict(extra="forbid", strict=True)


def refuse_extra(
    extra: dict[str, Any] | None,
    not_served: Mapping[str, tuple[Any, ...]],
    prefix: str = "",
    hints: Mapping[str, str] | None = None,
) -> None:
    """Raise InvalidRequest, naming the field, for a field that is unknown or not served.

    `not_served` maps known fields to the values that ask for nothing; null always does. `hints`
    says what to use instead.
    """
    for name, value in (extra or {}).items():
        if name not in not_served:
            raise InvalidRequest(f"unknown field: {prefix}{name}", prefix + name)
        if value is not None and value not in not_served[name]:
            hint = (hints or {}).get(name, "")
            message = f"{prefix}{name} is not supported by this version{hint and '; ' + hint}"
            raise InvalidRequest(message, prefix + name)


def _form(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


TextOr = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[T, Tag("<list>")], Discriminator(_form)
]
"""A text or a list of type T, decided by what is there, so that an error names its place."""
