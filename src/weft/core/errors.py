"""The tree of all errors that Weft raises on purpose.

    WeftError
    ├── InvalidRequest              400  a request's field is wrong; `param` names it
    │   ├── ContextLengthExceeded   400  prompt and answer are longer than the context
    │   ├── RequestRefused          400  engines died of requests like this one
    │   ├── BodyTooLarge            413  the body has more bytes than the operator allows
    │   ├── BodyTimeout             408  the body did not come in time
    │   └── UnsupportedMediaType    415  the body is not said to be plain JSON
    ├── Unauthorized                401  there is no API key, or a wrong one
    ├── PermissionDenied            403  the API key may not do that
    ├── ModelNotFound               404  no base model or adapter has that name
    ├── ResponseNotFound            404  no response of that id is stored
    ├── AdapterError                400  an adapter can't be loaded, changed or unloaded
    │   ├── AdapterInvalid          400  its files are not served; `param` names the field or tensor
    │   ├── AdapterConflict         400  the name is taken, or too much would be pinned
    │   │   └── GenerationConflict  409  somebody else changed the name in the registry first
    │   ├── QuotaExceeded           429  the tenant has published as much as it may
    │   ├── AdapterPathRefused      400  the path is not one that may be read
    │   ├── AdapterNotFound         404  there is no such adapter or path
    │   └── AdapterUnavailable      503  it was loaded once, but can't be brought to the device now
    │       └── AdapterQuarantined  503  its check failed; loading it again lifts this
    ├── Overloaded                  429  the queue is full; `retry_after_s` says when to try again
    ├── RequestTimeout              504  it took longer than the operator allows
    ├── EngineDead                  503  the engine process is gone
    ├── RegistryUnavailable         503  the shared registry does not answer: no changes now
    │   └── RegistryReadOnly        503  it answers, but can't be written, as its disk is full
    ├── NotReady                    503  something hangs; only `/ready` answers so
    ├── Unreachable                 502  a server that was asked does not answer, or is not Weft
    └── ConfigError                 500  the server can't start like this; `param` names the flag

Each has its HTTP status and a kind of its own. Errors cross the process boundary as
`(kind, message, param)`: see `to_wire` and `from_wire`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, NoReturn


class WeftError(Exception):
    """The base of the tree. `param` is the offending field, if there is one."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    headers: Mapping[str, str] = MappingProxyType({})
    """HTTP headers of the answer."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(WeftError):
    status = 400
    kind = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    kind = "context_length_exceeded"


MAXIMUM = "this model's maximum context length is"


def too_long(what: str, limit: int) -> str:
    """The words by which agents and gateways, such as Claude Code, LangChain and litellm, know that
    they have to shorten a conversation or to ask another model."""
    return f"{what} is too long: {MAXIMUM} {limit} tokens, and the {what}"


class RequestRefused(InvalidRequest):
    kind = "request_refused"


class BodyTooLarge(InvalidRequest):
    status = 413
    kind = "request_too_large"


class BodyTimeout(InvalidRequest):
    """The connection is of no use afterwards, as the rest of the body may still come."""

    status = 408
    kind = "body_timeout"
    headers = MappingProxyType({"connection": "close"})


class UnsupportedMediaType(InvalidRequest):
    status = 415
    kind = "unsupported_media_type"


class Unauthorized(WeftError):
    status = 401
    kind = "invalid_api_key"
    headers = MappingProxyType({"www-authenticate": "Bearer"})


class PermissionDenied(WeftError):
    status = 403
    kind = "permission_denied"


class ModelNotFound(WeftError):
    status = 404
    kind = "model_not_found"


class ResponseNotFound(WeftError):
    status = 404
    kind = "response_not_found"


class AdapterError(WeftError):
    status = 400
    kind = "adapter_error"


class AdapterInvalid(AdapterError):
    kind = "adapter_invalid"


class AdapterConflict(AdapterError):
    kind = "adapter_conflict"


class GenerationConflict(AdapterConflict):
    status = 409
    kind = "generation_conflict"


class QuotaExceeded(AdapterError):
    status = 429
    kind = "quota_exceeded"


class AdapterPathRefused(AdapterError):
    kind = "adapter_path_refused"


class AdapterNotFound(AdapterError):
    status = 404
    kind = "adapter_not_found"


class AdapterUnavailable(AdapterError):
    status = 503
    kind = "adapter_unavailable"


class AdapterQuarantined(AdapterUnavailable):
    kind = "adapter_quarantined"


class Overloaded(WeftError):
    status = 429
    kind = "overloaded"

    def __init__(
        self, message: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        """`retry_after_s`: whole seconds after which it is worth trying again, if that is known;
        it does not cross the process boundary."""
        super().__init__(message, param)
        if retry_after_s is not None:
            self.headers = {"retry-after": str(retry_after_s)}


class RequestTimeout(WeftError):
    status = 504
    kind = "request_timeout"


class EngineDead(WeftError):
    status = 503
    kind = "engine_dead"

    def __init__(self, message: str, param: str | None = None, *, killed: bool = False) -> None:
        """`killed`: whether no request is to blame, such as when its process was killed from
        outside."""
        super().__init__(message, param)
        self.killed = killed


class RegistryUnavailable(WeftError):
    """`str(error)` is for the operator, and may say where the registry is. `message`, which goes to
    clients, does not."""

    status = 503
    kind = "registry_unavailable"

    def __init__(self, message: str, param: str | None = None, *, full: str = "") -> None:
        """`full`: the text for the operator, if it is another one than clients get."""
        super().__init__(message, param)
        self.args = (full or message,)


class RegistryReadOnly(RegistryUnavailable):
    """The registry has no room for more, does not let this process write, or lies on a store that
    can't hold one."""

    kind = "registry_read_only"


def for_clients(how: str) -> str:
    """What clients are told of a registry that can't be used: neither its folder or bucket, nor
    what the file system or the network said."""
    return f"the registry {how}: try again later, or ask the operator, whose log says why"


class NotReady(WeftError):
    status = 503
    kind = "not_ready"


class Unreachable(WeftError):
    status = 502
    kind = "unreachable"


class ConfigError(WeftError):
    kind = "config_error"


def _tree(cls: type[WeftError]) -> dict[str, type[WeftError]]:
    found = {cls.kind: cls}
    for sub in cls.__subclasses__():
        found |= _tree(sub)
    return found


type_of_kind: dict[str, type[WeftError]] = _tree(WeftError)


def refuse_file(name: str, why: str) -> NoReturn:
    """Raise AdapterInvalid for a file in an adapter's folder."""
    raise AdapterInvalid(f"{name}: {why}", name)


def shown(value: object) -> str:
    """A value that was refused, as the error's message shows it: shortened if it is long."""
    try:
        return f"{value!r:.100}"
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"a very long {type(value).__name__}"


def check_switches(**switches: object) -> None:
    """Raises InvalidRequest for an argument, by its name, that is neither True nor False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name} must be true or false, got {shown(value)}", name)


def to_wire(error: BaseException) -> tuple[str, str, str | None]:
    """`(kind, message, param)`; anything that is not a WeftError becomes a server error."""
    if isinstance(error, WeftError):
        return error.kind, error.message, error.param
    return WeftError.kind, f"{type(error).__name__}: {error}", None


def from_wire(wire: tuple[str, str, str | None]) -> WeftError:
    kind, message, param = wire
    return type_of_kind.get(kind, WeftError)(message, param)
