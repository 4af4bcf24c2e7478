"""Records by which requests, registries and engines name adapters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.errors import InvalidRequest, shown
from weft.core.numbers import is_number

MAX_PARTS = 8
MAX_SCALE = 100.0
"""The largest magnitude of a scale."""


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One version of an adapter, which never changes. `digest` is a sha256 over its configuration
    and weights, in hex. It tells contents apart wherever they are kept or cached."""

    name: str
    """In a shared registry, the name includes the version's number: `acme/sql@v7`."""
    version: int
    digest: str

    @property
    def bare(self) -> str:
        """The name without a number, under which metrics count."""
        return self.name.removesuffix(f"@v{self.version}")


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where an engine finds an adapter, and what is known of it already."""

    path: str
    """A folder that the engine can read."""
    digest: str | None = None
    """The content that the folder must have. It may then come from the cache of images, without
    reading the folder; None: whatever is there."""
    checked: bool = False
    """Whether an engine like this one has checked that content on its device."""
    root: str = "/"
    """The folder outside of which nothing may be opened."""
    identity: tuple[int, int] | None = None
    """`Folder.identity` of the folder that is meant: later, its path may lead to another one."""
    peers: tuple[str, ...] = ()
    """HOST:PORT of other nodes that have the content."""
    listing: str = ""
    """See `weft.registry.records.Version.listing`."""

    def again(self, digest: str | None = None, checked: bool = False) -> AdapterSource:
        """The same folder, to be read later: then its digest alone says whether it is unchanged."""
        listing = self.listing if digest == self.digest else ""
        return AdapterSource(self.path, digest, checked, self.root, listing=listing)


@dataclass(frozen=True, slots=True)
class ClassHead:
    """The classification head of an adapter that was trained to classify texts: a matrix (labels,
    hidden), by which the hidden state of a text's last token is multiplied."""

    num_labels: int
    weight: bytes
    """Little-endian float32, row by row."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What the engine reports of an adapter that it accepted."""

    digest: str
    path: str
    max_rank: int
    num_bytes: int
    targets: tuple[str, ...]
    """Names of the adapted projections without the layer, e.g. ("q_proj", "v_proj")."""
    conversion_error: float = 0.0
    """For an adapter of another kind that is served as a LoRA: the error of this LoRA, as the
    relative Frobenius norm in its worst target; 0 if it is exact."""
    conversion_worst: str = ""
    """The target with that error."""
    invocation_token_ids: tuple[int, ...] = ()
    """The tokens that activate it: it is active from where they occur last in the prompt, and
    nowhere without them. Empty if it is active everywhere."""
    vocab_size: int = 0
    """The size of its vocabulary if it differs from the base's, else 0."""
    checked: bool = False
    """Whether a check has shown that the device computes it as its files say."""
    head: ClassHead | None = None
    """It is applied outside of the engine, which knows nothing of it."""


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """One of several adapters that are summed, and the factor of its part."""

    ref: AdapterRef
    scale: float


@dataclass(frozen=True, slots=True)
class WeightedAdapter:
    """An adapter by its name, and the factor of its part in a sum, from -100 to 100. Raises
    InvalidRequest for any other scale."""

    name: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        scale = self.scale
        if not is_number(scale):
            message = f"adapters: a scale must be a number, got {shown(scale)}"
            raise InvalidRequest(message, "adapters")
        if abs(scale) > MAX_SCALE:
            bounds = f"[{-MAX_SCALE:g}, {MAX_SCALE:g}]"
            message = f"adapters: a scale must be in {bounds}, got {shown(scale)}"
            raise InvalidRequest(message, "adapters")
        object.__setattr__(self, "scale", float(scale))


def check_parts(adapters: Sequence[WeightedAdapter]) -> None:
    """Raises InvalidRequest unless there are 1 to MAX_PARTS adapters, all with different names."""
    if not 1 <= len(adapters) <= MAX_PARTS:
        message = f"adapters must hold 1 to {MAX_PARTS} adapters, got {len(adapters)}"
        raise InvalidRequest(message, "adapters")
    names = [each.name for each in adapters]
    for name in names:
        if names.count(name) > 1:
            message = f"adapters names {name!r} twice; name it once, with the sum of its scales"
            raise InvalidRequest(message, "adapters")


def sum_of(parts: Sequence[AdapterPart]) -> tuple[AdapterRef, tuple[AdapterPart, ...]]:
    """The AdapterRef of a weighted sum, whatever the order of `parts`, and the parts in the order
    in which they are added up.

    The digest is made of the parts' digests and scales. The name is all their names, joined by
    commas, which no adapter's own name contains. The version is 0.
    """
    ordered = tuple(sorted(parts, key=lambda part: (part.ref.digest, part.scale)))
    said = ["weighted sum", *([part.ref.digest, float(part.scale).hex()] for part in ordered)]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    return AdapterRef(",".join(sorted(part.ref.name for part in parts)), 0, digest), ordered
