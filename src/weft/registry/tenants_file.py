"""The TOML file that lists a server's tenants. It is read strictly: a value that is unknown, given
twice or out of range is an error that names its place, and nothing of the file is used.

    [tenants.acme]
    weight = 2.0
    may_use = ["globex/sql", "initech/*"]
    caps = { max_open_requests = 64 }

    [[tenants.acme.keys]]
    id = "acme-app"
    sha256 = "..."
    roles = ["use"]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, create_model

from weft.core.errors import ConfigError
from weft.core.numbers import MAX_NUMBER
from weft.core.option_files import read_option_text
from weft.core.tenants import Caps, Tenant
from weft.registry.names import MAX_NAME_LENGTH
from weft.registry.tenants import Change, Directory, Member, Role, TenantKey

_NAME = "[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*"
"""Safe as a folder's name, in URLs and in labels."""
MAX_TENANT_LENGTH = 64
"""Characters."""

_PATTERNS = {
    f"^{_NAME}$": "letters and digits of ASCII, with single . _ or - between them",
    f"^{_NAME}/[^,]+$": "TENANT/ADAPTER, or TENANT/* for all adapters of a tenant",
    "^[0-9a-f]{64}$": "64 hexadecimal digits in lower case",
}
"""What must match, and in words."""
_NAMES, _ADAPTERS, _SHA256 = _PATTERNS

_Name = Annotated[str, Field(pattern=_NAMES, max_length=MAX_TENANT_LENGTH)]
_Adapters = Annotated[str, Field(pattern=_ADAPTERS, max_length=MAX_NAME_LENGTH)]
_Cap = Annotated[int, Field(ge=1, le=MAX_NUMBER)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Key(_Strict):
    id: _Name
    sha256: Annotated[str, Field(pattern=_SHA256)]
    roles: Annotated[list[Role], Field(min_length=1)]
    expires: AwareDatetime | None = None


_caps: dict[str, Any] = {cap.name: (_Cap | None, None) for cap in fields(Caps)}
_Caps: Any = create_model("_Caps", __base__=_Strict, **_caps)


class _Tenant(_Strict):
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    shares_prefixes: bool = False
    caps: _Caps = Field(default_factory=_Caps)
    keys: list[_Key] = []
    may_use: list[_Adapters] = []
    lora_roots: list[str] | None = None


class _File(_Strict):
    tenants: dict[_Name, _Tenant] = {}


class TenantsFile:
    """A file of tenants, and its content when it was last read without an error."""

    def __init__(self, path: Path, lora_roots: Sequence[Path] = ()) -> None:
        """A tenant whose folders the file does not name may load what lies in `ROOT/tenant` of
        each of `lora_roots`. Raises ConfigError."""
        self.path = path
        self.by_name: dict[str, Tenant] = {}
        """The tenants, for those who look one up at any time."""
        self._lora_roots = tuple(lora_roots)
        self._set(self._read())

    def reload(self) -> list[Change]:
        """Read the file again, and return what is different now. If it raises ConfigError, nothing
        changes. A file without tenants raises it too, as it may be just being written."""
        before, after = self.directory, self._read()
        if before.members and not after.members:
            message = f"--tenants {self.path}: it has no tenants left; restart to serve none"
            raise ConfigError(message, "tenants")
        self._set(after)
        return before.changes_to(after)

    def _set(self, directory: Directory) -> None:
        self.directory, self.keychain = directory, directory.keychain()
        self.by_name.clear()
        self.by_name.update((tenant.name, tenant) for tenant in directory.tenants)

    def _read(self) -> Directory:
        named = f"--tenants {self.path}"
        text = read_option_text(self.path, named, "tenants")
        try:
            return parse_tenants(text, self._lora_roots)
        except ConfigError as error:
            raise ConfigError(f"{named}: {error.message}", error.param) from None


def parse_tenants(text: str, lora_roots: Sequence[Path] = ()) -> Directory:
    """Parse a file of tenants; `lora_roots` are as in `TenantsFile`. Raises ConfigError, whose
    `param` is the place, such as `tenants.acme.keys[0].roles`."""
    tables = _tables(text)
    directory = Directory({name: _member(name, t, lora_roots) for name, t in tables.items()})
    check_unique(directory.members)
    return directory


def tenants_as_json(text: str) -> dict[str, str]:
    """The table of each tenant in such a file, as a shared registry keeps it. Raises ConfigError as
    `parse_tenants`, and for a cap that would do nothing there."""
    parse_tenants(text)
    tables = _tables(text)
    for name, table in tables.items():
        if table.caps.max_adapter_bytes is not None:
            place = _place(["tenants", name, "caps", "max_adapter_bytes"])
            _refuse(place, "it has no effect with a registry; set max_stored_bytes instead")
    return {name: t.model_dump_json(exclude_defaults=True) for name, t in tables.items()}


def read_tenant(name: str, settings: str, lora_roots: Sequence[Path] = ()) -> Member:
    """A tenant whose table is this JSON; `lora_roots` are as in `TenantsFile`. Raises
    ConfigError."""
    try:
        return _member(name, _Tenant.model_validate_json(settings), lora_roots)
    except ValidationError as error:
        _refuse_first(error, "tenants", name)


def _tables(text: str) -> dict[str, _Tenant]:
    try:
        return dict(_File.model_validate(tomllib.loads(text)).tenants)
    except ValidationError as error:
        _refuse_first(error)
    except (ValueError, RecursionError) as error:  # also for numbers of too many digits
        raise ConfigError(f"it is not TOML: {error}", "tenants") from None


_MOMENT = "a date and time with a time zone, without quotes, such as 2027-01-01T00:00:00Z"
_WANTED = {
    "bool": "true or false",
    "datetime": _MOMENT,
    "dict": "a table",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "model": "a table",
    "string": "a text",
    "timezone": _MOMENT,
}
"""What a field takes, by the first word of the fault's type."""


def _refuse_first(error: ValidationError, *place: str) -> NoReturn:
    first = error.errors(include_url=False, include_input=False)[0]
    match first["type"]:
        case "string_pattern_mismatch":
            told = f"it must be {_PATTERNS[first['ctx']['pattern']]}"
        case "greater_than":
            told = f"it must be more than {first['ctx']['gt']:g}"
        case "greater_than_equal":
            told = f"it must be at least {first['ctx']['ge']:g}"
        case "less_than_equal":
            told = f"it must be at most {first['ctx']['le']:g}"
        case "too_short":
            told = "it must not be empty"
        case "string_too_long":
            told = f"it must have at most {first['ctx']['max_length']} characters"
        case "extra_forbidden":
            told = "there is no such field"
        case "missing":
            told = "it is required"
        case "literal_error":
            told = f"it must be {first['ctx']['expected']}"
        case kind:
            wanted = _WANTED.get(kind.split("_")[0])
            told = first["msg"] if wanted is None else f"it must be {wanted}"
    _refuse(_place([*place, *(part for part in first["loc"] if part != "[key]")]), told)


def _member(name: str, given: _Tenant, lora_roots: Sequence[Path]) -> Member:
    folders = given.lora_roots
    roots = [root / name for root in lora_roots] if folders is None else map(Path, folders)
    for i, folder in enumerate(folders or ()):
        if not Path(folder).is_absolute():
            _refuse(_place(["tenants", name, "lora_roots", i]), "it must be an absolute path")
    return Member(
        Tenant(name, given.weight, Caps(**given.caps.model_dump()), given.shares_prefixes),
        tuple(TenantKey(k.id, k.sha256, frozenset(k.roles), k.expires) for k in given.keys),
        frozenset(given.may_use),
        tuple(roots),
    )


def check_unique(members: Mapping[str, Member]) -> None:
    """Raises ConfigError when a key, its id or a tenant's name is there twice."""
    seen: dict[tuple[str, str], str] = {}

    def claim(kind: str, value: str, place: str) -> None:
        other = seen.setdefault((kind, value), place)
        if other != place:
            _refuse(place, f"it is the same as {other}")

    for name, member in members.items():
        claim("tenant", name.lower(), _place(["tenants", name]))
        for i, key in enumerate(member.keys):
            claim("id", key.id, _place(["tenants", name, "keys", i, "id"]))
            claim("sha256", key.sha256, _place(["tenants", name, "keys", i, "sha256"]))


def _place(parts: Iterable[int | str]) -> str:
    """Write `("tenants", "acme", "keys", 0)` as `tenants.acme.keys[0]`."""
    place = ""
    for part in parts:
        if isinstance(part, int):
            place += f"[{part}]"
        else:
            shown = part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'"{part[:80]}"'
            place += f".{shown}" if place else shown
    return place


def _refuse(place: str, why: str) -> NoReturn:
    raise ConfigError(f"{place}: {why}", place)
