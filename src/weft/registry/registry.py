"""Owns the names of adapters, the version of each, and the requests that still use old ones.

    publish ──> live ──(retire, or replaced)──> draining ──(last lease released)──> drained
                 └──────────────── without leases ─────────────────────────────────┘

A name points to at most one live version. Lookup and pin are one step (`resolve`), so that a
version can't vanish between them. Everything here is called from one event loop, and never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from weft.core.adapters import (
    AdapterInfo,
    AdapterPart,
    AdapterRef,
    WeightedAdapter,
    check_parts,
    sum_of,
)
from weft.core.errors import AdapterConflict, AdapterNotFound, InvalidRequest, ModelNotFound
from weft.registry.names import appearance, check_name, check_prefix

OnDrained = Callable[[AdapterRef], None]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models."""

    id: str
    root: str
    """Where the model came from: an adapter's path, the base model's folder or its hub id."""
    parent: str | None
    """The base model's name; None for the base itself."""


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """A live version of an adapter, and where it came from."""

    ref: AdapterRef
    info: AdapterInfo
    path: str
    pinned: bool
    """Whether its name keeps its content on the device; so may another name with that content."""


@dataclass(slots=True, eq=False)
class _Version:
    """One published version and its users."""

    ref: AdapterRef
    info: AdapterInfo
    path: str
    pinned: bool = False
    leases: int = 0
    retired: bool = False
    on_drained: OnDrained | None = None


class Lease:
    """The right to use the version `ref` until `release`. `ref` is None for the base model, and
    stands for the weighted sum of `parts` if there are any."""

    __slots__ = ("_release", "parts", "ref")

    def __init__(
        self,
        ref: AdapterRef | None,
        release: Callable[[], None] | None = None,
        parts: tuple[AdapterPart, ...] = (),
    ) -> None:
        self.ref = ref
        self.parts = parts
        self._release = release

    def release(self) -> None:
        """Give the right back. A second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def other_content(name: str) -> AdapterConflict:
    """The error for a name that has other content already, and is not to be replaced."""
    remedy = "to replace it, set load_inplace (in Python: replace)"
    message = f"The lora adapter {name!r} has already been loaded with other content; {remedy}"
    return AdapterConflict(message, "lora_name")


class AdapterRegistry:
    """The names of one base model and its adapters. `check()` states the invariants."""

    def __init__(self, base_names: Sequence[str], base_root: str) -> None:
        """`base_names` are what requests call the base model, its own name first; `base_root` is
        its folder or its hub id."""
        if not base_names:
            raise ValueError("a base model needs a name")
        self.base_names = tuple(dict.fromkeys(base_names))
        self.base_root = base_root
        self._live: dict[str, _Version] = {}
        self._looks = {appearance(name): name for name in self.base_names}
        """The base's names and the live names, by `appearance`. Versions of a shared registry are
        left out, as two of its names may look alike."""
        self._draining: set[_Version] = set()
        self._last_version: dict[str, int] = {}
        """The last version number of every name ever published here, except a shared registry's
        names."""
        self._loading: dict[str, list[str]] = {}

    def resolve(self, model: str) -> Lease:
        """Look `model` up and pin what it points to: a base name, an adapter's name, or
        `base:adapter`. Raises ModelNotFound."""
        version = self._find(model)
        return self._lease(version.ref, [version]) if version else Lease(None)

    def resolve_sum(self, adapters: Sequence[WeightedAdapter]) -> Lease:
        """Look up and pin the adapters of a weighted sum, by their exact names. One alone with the
        scale 1 is leased as itself. Raises InvalidRequest, ModelNotFound (`adapters`)."""
        check_parts(adapters)
        versions = [self._live.get(each.name) for each in adapters]
        found = [version for version in versions if version is not None]
        if len(found) < len(versions):
            name = adapters[versions.index(None)].name
            raise ModelNotFound(f"The adapter {name!r} does not exist", "adapters")
        if len(found) == 1 and adapters[0].scale == 1.0:
            return self._lease(found[0].ref, found)
        if heads := [version.ref.bare for version in found if version.info.head]:
            message = f"adapters: {heads[0]!r} classifies texts, and can't be part of a sum"
            raise InvalidRequest(message, "adapters")
        parts = [AdapterPart(v.ref, a.scale) for v, a in zip(found, adapters, strict=True)]
        ref, ordered = sum_of(parts)
        return self._lease(ref, found, ordered)

    def card(self, model: str) -> ModelCard:
        """Describe what `model` names, as `resolve` understands it. Raises ModelNotFound."""
        version = self._find(model)
        if version is None:
            return ModelCard(model, self.base_root, None)
        return ModelCard(version.ref.name, version.path, self.base_names[0])

    @contextmanager
    def reserve(self, name: str, path: str) -> Iterator[None]:
        """Hold `name` while the adapter in `path` is loaded for it, which is slow.

        Loads of the same path may run side by side. Raises InvalidRequest (an unsafe name),
        AdapterConflict (the base model's name, or another path is being loaded under it).
        """
        self.check_new(name)
        paths = self._loading.setdefault(name, [])
        if paths and path not in paths:
            message = f"The lora adapter {name!r} is being loaded from another path"
            raise AdapterConflict(message, "lora_name")
        paths.append(path)
        try:
            yield
        finally:
            paths.remove(path)
            if not paths:
                del self._loading[name]

    def publish(
        self,
        name: str,
        info: AdapterInfo,
        path: str,
        replace: bool = False,
        on_drained: OnDrained | None = None,
        pinned: bool = False,
        number: int | None = None,
    ) -> AdapterRef:
        """Let `name` point to the content that `info` describes. `path` is shown as its source;
        `pinned` says whether this name keeps the content on the device.

        Content that the name already has keeps its version. Other content needs `replace`: the old
        version is then retired, and `on_drained` called when it is drained.
        With a `number`, the name is that of a version in a shared registry, such as `acme/sql@v7`,
        which always has the same content. Raises InvalidRequest, AdapterConflict.
        """
        if number is None:
            self.check_new(name)
        old = self._live.get(name)
        if old is not None and old.ref.digest == info.digest:
            old.info, old.path, old.pinned = info, path, pinned
            return old.ref
        if old is not None and not replace:
            raise other_content(name)
        if number is None:
            self._last_version[name] = number = self._last_version.get(name, 0) + 1
            self._looks[appearance(name)] = name
        ref = AdapterRef(name, number, info.digest)
        self._live[name] = _Version(ref, info, path, pinned)
        if old is not None:
            self._retire(old, on_drained)
        return ref

    def arrange(self, names: Iterable[str]) -> None:
        """Move these live names to the end of the listing, in this order."""
        for name in names:
            self._live[name] = self._live.pop(name)

    def retire(self, name: str, on_drained: OnDrained | None = None) -> AdapterRef:
        """Give no more leases of `name`, which can be published again. `on_drained` is called once,
        with the version, when its last lease is released (at once if it has none).

        Raises AdapterNotFound.
        """
        version = self._live.pop(name, None)
        if version is None:
            raise AdapterNotFound(f"The lora adapter {name!r} cannot be found", "lora_name")
        if self._looks.get(look := appearance(name)) == name:
            del self._looks[look]
        self._retire(version, on_drained)
        return version.ref

    def info(self, name: str) -> AdapterInfo | None:
        """The engine's description of the live version of `name`, if there is one."""
        version = self._live.get(name)
        return version.info if version else None

    # -- names, as `access.Names` has it -------------------------------------------------------

    def split(self, name: str) -> tuple[str, str]:
        return name, ""  # there are no versions to be named here

    def has(self, name: str) -> bool:
        return name in self._live

    def digest(self, name: str) -> str | None:
        version = self._live.get(name)
        return version.ref.digest if version else None

    def names(self, namespaces: Collection[str] | None = None, after: str = "") -> Iterator[str]:
        """In the order of their publication."""
        names = iter(self._live)
        if after and after not in names:  # which takes all up to this one from the iterator
            raise InvalidRequest(f"after: there is no model {after!r}", "after")
        return names

    def check_new(self, name: str) -> None:
        if name in self.base_names:
            raise AdapterConflict(f"{name!r} is the base model's name", "lora_name")
        check_name(name)
        check_prefix(name, self.base_names)
        if self._looks.get(appearance(name), name) != name:
            raise AdapterConflict(f"{name!r} looks like another adapter's name", "lora_name")

    # ------------------------------------------------------------------------------------------

    def adapters(self) -> dict[AdapterRef, AdapterInfo]:
        """The engine's description of each live version."""
        return {version.ref: version.info for version in self._live.values()}

    def adapter_cards(self) -> list[AdapterCard]:
        """The live versions in the order of their publication, with their sources and pins."""
        return [AdapterCard(v.ref, v.info, v.path, v.pinned) for v in self._live.values()]

    def digests(self) -> set[str]:
        """The contents of all versions that may still be used; for any thread."""
        return {v.ref.digest for v in [*list(self._live.values()), *list(self._draining)]}

    def needs(self, ref: AdapterRef) -> bool:
        """Whether a version of the same name and content is live, or still has leases: until then
        the engine must hold that content for this name."""
        live = self._live.get(ref.name)
        if live is not None and live.ref.digest == ref.digest:
            return True
        same = (ref.name, ref.digest)
        return any((v.ref.name, v.ref.digest) == same for v in self._draining)

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        for name, version in self._live.items():
            assert version.ref.name == name and name not in self.base_names
            assert not version.retired and not version.on_drained and version.leases >= 0
            assert version.ref.version == self._last_version.get(name, version.ref.version)
            assert version.ref.digest == version.info.digest
        for version in self._draining:
            assert version.retired and version.leases > 0, "drained, but still held"
            live = self._live.get(version.ref.name)
            assert (
                live is None
                or live.ref.digest == version.ref.digest
                or (live.ref.version > version.ref.version)
            )
        assert all(self._loading.values()), "a reservation without a load"
        names = {*self._live, *self.base_names}
        assert self._looks == {appearance(n): n for n in names & {*self._looks.values()}}

    def _find(self, model: str) -> _Version | None:
        """Find the version that `model` names, or None if it is the base model."""
        if model in self.base_names:
            return None
        version = self._live.get(model)
        for base in self.base_names:
            if version is None and model.startswith(f"{base}:"):
                version = self._live.get(model[len(base) + 1 :])
        if version is None:
            raise ModelNotFound(f"The model {model!r} does not exist", "model")
        return version

    def _lease(
        self, ref: AdapterRef, versions: list[_Version], parts: tuple[AdapterPart, ...] = ()
    ) -> Lease:
        for version in versions:
            version.leases += 1

        def release() -> None:
            for version in versions:
                version.leases -= 1
                self._end_if_drained(version)

        return Lease(ref, release, parts)

    def _retire(self, version: _Version, on_drained: OnDrained | None) -> None:
        version.retired, version.on_drained = True, on_drained
        self._draining.add(version)
        self._end_if_drained(version)

    def _end_if_drained(self, version: _Version) -> None:
        if version.retired and version.leases == 0:
            self._draining.remove(version)
            if version.on_drained is not None:
                version.on_drained(version.ref)


class Holders:
    """The holders of each content: a set of names for each digest, without counts.

    hold ──> held ──(its last holder releases it)──> draining ──(no request uses it)──> forgotten
              ^───────────────(held again)──────────────┘

    A repeated `hold` or `release` changes nothing, so all holds can be repeated to a new engine.
    `check()` states the invariants.
    """

    def __init__(self) -> None:
        self._pins: dict[str, dict[str, bool]] = {}
        """By digest: each holder, and whether it pins the content."""
        self._draining: set[str] = set()

    def hold(self, digest: str, holder: str, pinned: bool = False) -> None:
        """Let `holder` hold this content; if it does so already, only its pin changes."""
        self._pins.setdefault(digest, {})[holder] = pinned
        self._draining.discard(digest)

    def release(self, digest: str, holder: str) -> None:
        """Let `holder` hold it no longer. The content drains if that was its last holder."""
        pins = self._pins.get(digest, {})
        if pins.pop(holder, None) is not None and not pins:
            del self._pins[digest]
            self._draining.add(digest)

    def is_held(self, digest: str) -> bool:
        return digest in self._pins

    def is_pinned(self, digest: str) -> bool:
        """Whether anybody who holds it pins it."""
        return any(self._pins.get(digest, {}).values())

    def would_be_pinned(self, digest: str, holder: str, pinned: bool) -> bool:
        """What `is_pinned` would return after this `hold`."""
        pins = self._pins.get(digest, {})
        return pinned or any(other for name, other in pins.items() if name != holder)

    def take_drained(self, in_use: Callable[[str], bool]) -> list[str]:
        """Remove and return the content that has no holder and is not `in_use`: forget it now."""
        if not self._draining:
            return []
        drained = sorted(digest for digest in self._draining if not in_use(digest))
        self._draining.difference_update(drained)
        return drained

    def known(self) -> set[str]:
        """All content that is held or drains."""
        return self._pins.keys() | self._draining

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert all(self._pins.values()), "held by nobody, and not draining"
        assert not self._pins.keys() & self._draining, "held, and draining"
