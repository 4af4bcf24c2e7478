"""The names of a shared registry in the order in which they are listed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import merge

from weft.core.errors import AdapterConflict, InvalidRequest, ModelNotFound
from weft.registry.names import (
    MAX_NAME_LENGTH,
    appearance,
    check_name,
    check_prefix,
    namespace_of,
)
from weft.registry.records import Name
from weft.registry.registry import ModelCard
from weft.registry.releases import main_number, number_of, split
from weft.registry.shared import SharedRegistry
from weft.registry.state import State

_VERSION_LENGTH = 12
"""Characters that are left for a version behind a name."""


def check_shared_name(name: str) -> None:
    """Raises InvalidRequest for a name that can't be told from a version, or is not safe."""
    check_name(name)
    if len(name) > (most := MAX_NAME_LENGTH - _VERSION_LENGTH):
        message = f"lora_name must not be longer than {most} characters"
    elif {"", "."} & {*name.split("/")}:
        message = "lora_name must not have an empty part or '.' between its '/'"
    elif split(name)[1]:
        message = "lora_name must not end like a version: those are made by the registry"
    else:
        return
    raise InvalidRequest(message, "lora_name")


class SharedNames:
    """A shared registry's names, as `access.Names`. Questions about one name are answered from the
    newest state. Lists are sorted, and follow that state by `update`."""

    def __init__(self, shared: SharedRegistry, base_names: Sequence[str], base_root: str) -> None:
        """The base's names and root are as in `AdapterRegistry`."""
        self._shared = shared
        self._base_names, self.base_root = tuple(base_names), base_root
        self._sorted: dict[str, list[str]] = {}
        """The names in each namespace that requests may use without a version; "" has those
        without a namespace."""
        self._looks: dict[str, set[str]] = {}
        """Names that are not in ASCII, by what they look like."""
        for name, entry in shared.state.names.items():
            if self._is_listed(entry):
                self._sorted.setdefault(namespace_of(name), []).append(name)
                self._add_look(name)
        for names in self._sorted.values():
            names.sort()

    @property
    def state(self) -> State:
        return self._shared.state

    def entry(self, name: str) -> Name | None:
        """The registry's entry for a name; None for a name that is unknown or was removed."""
        entry = self._shared.state.names.get(name)
        return entry if entry is not None and entry.removed_at is None else None

    def update(self, changed: Iterable[str]) -> None:
        """Bring the sorted lists up to date with these names."""
        for name in changed:
            names = self._sorted.setdefault(namespace_of(name), [])
            place = bisect_left(names, name)
            was_there = place < len(names) and names[place] == name
            if not self._is_listed(self.entry(name)):
                if was_there:
                    del names[place]
                    self._looks.get(appearance(name), set()).discard(name)
            elif not was_there:
                insort(names, name)
                self._add_look(name)

    # -- as access.Names -----------------------------------------------------------------------

    def split(self, name: str) -> tuple[str, str]:
        return split(name)

    def has(self, name: str) -> bool:
        return self.entry(name) is not None

    def digest(self, name: str) -> str | None:
        entry = self.entry(name)
        number = main_number(entry.route) if entry else None
        return entry.versions[number].digest if entry and number else None

    def names(self, namespaces: Collection[str] | None = None, after: str = "") -> Iterator[str]:
        """The names in sorted order. Iterate over them before the next `update`."""
        chosen = self._sorted if namespaces is None else namespaces
        lists = [self._sorted[each] for each in chosen if each in self._sorted]
        pairs = [(names, bisect_right(names, after)) for names in lists]
        # No slices, which would copy what comes after, nor islice, which goes through what is left
        # out.
        return merge(*(map(names.__getitem__, range(i, len(names))) for names, i in pairs))

    def card(self, model: str) -> ModelCard:
        if model in self._base_names:
            return ModelCard(model, self.base_root, None)
        name, wanted = split(model)
        entry = self.entry(name)
        number = entry and (number_of(entry, wanted) if wanted else main_number(entry.route))
        if entry is None or (wanted and number is None):
            raise ModelNotFound(f"The model {model!r} does not exist", "model")
        source = entry.versions[number].source if number else ""
        return ModelCard(model, source or model, self._base_names[0])

    def check_new(self, name: str) -> None:
        check_shared_name(name)
        check_prefix(name, self._base_names)
        if name in self._base_names:
            raise AdapterConflict(f"{name!r} is the base model's name", "lora_name")
        look = appearance(name)
        others = self._looks.get(look, set()) - {name}
        if others or (look != name and (self.has(look) or look in self._base_names)):
            raise AdapterConflict(f"{name!r} looks like another adapter's name", "lora_name")

    # ------------------------------------------------------------------------------------------

    def _is_listed(self, entry: Name | None) -> bool:
        return entry is not None and bool(entry.route.shares)

    def _add_look(self, name: str) -> None:
        if not name.isascii():
            self._looks.setdefault(appearance(name), set()).add(name)

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        there = {n for n, entry in self._shared.state.names.items() if self._is_listed(entry)}
        assert {name for names in self._sorted.values() for name in names} == there
        for namespace, names in self._sorted.items():
            assert names == sorted(set(names))
            assert all(namespace_of(name) == namespace for name in names)
