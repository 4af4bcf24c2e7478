"""The kinds of PEFT adapters that are served: one file each, whose `KIND` says all about it.

Third parties add theirs with an entry point in the group `weft.adapter_kinds`, whose name is the
`peft_type` and whose value is a `weft.checkpoint.kinds.base.Kind`. It is loaded when an adapter of
that type is first read.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from weft.checkpoint.refuse import refuse, show

if TYPE_CHECKING:
    from weft.checkpoint.kinds.base import Kind

ENTRY_POINT_GROUP = "weft.adapter_kinds"

_BUILT_IN = {
    "LORA": "lora",
    "ADALORA": "adalora",
    "VERA": "vera",
    "LOHA": "loha",
    "LOKR": "lokr",
    "IA3": "ia3",
}
"""The module below this one, by `peft_type`."""


@cache
def installed() -> dict[str, EntryPoint]:
    """The kinds of third parties by `peft_type`. Looking for them takes long, so it is done once,
    and only when a `peft_type` is not built in."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def kind_names() -> list[str]:
    """Every `peft_type` that is served, built-in ones first."""
    return [*_BUILT_IN, *installed()]


def find_kind(peft_type: object) -> Kind:
    """The kind of that name. Raises AdapterInvalid when there is none."""
    if isinstance(peft_type, str):
        if peft_type in _BUILT_IN:
            built_in: Kind = import_module(f"{__name__}.{_BUILT_IN[peft_type]}").KIND
            return built_in
        if peft_type in installed():
            plugin: Kind = installed()[peft_type].load()
            return plugin
    return refuse("peft_type", f"only {', '.join(kind_names())} are served, got {show(peft_type)}")
