"""Adapters as requests and registries name them, and what an engine tells of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One immutable adapter version. `digest` (sha256, hex) keys slots, KV and images."""

    name: str
    version: int
    digest: str


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
    """How far the LoRA that is served for an adapter of another kind is off, as the relative
    Frobenius norm in its worst target; 0 if it is exact."""
    conversion_worst: str = ""
    """The target with that error."""
    invocation_token_ids: tuple[int, ...] = ()
    """The tokens that activate it: it is active from where they occur last in the prompt, and
    nowhere without them. Empty if it is active everywhere."""
    vocab_size: int = 0
    """The size of its vocabulary if that is another than the base's, else 0."""
    checked: bool = False
    """Whether the device was seen to compute it as its files say."""


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """One of several adapters that are summed, and what its part is multiplied by."""

    ref: AdapterRef
    scale: float
