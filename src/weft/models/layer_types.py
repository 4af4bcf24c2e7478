"""Reads the kind of each layer from a configuration."""

from __future__ import annotations

from typing import Any

from weft.core.errors import ConfigError
from weft.models.family import RopeParameters


def no_windows(hf: Any) -> tuple[int | None, ...]:
    """No layer has a window."""
    return (None,) * int(hf.num_hidden_layers)


def one_window_by_type(hf: Any) -> tuple[int | None, ...]:
    """The window of each layer, None where its type says that it has none."""
    types = attention_types(hf)
    if hf.sliding_window is None and "sliding_attention" in types:
        raise ConfigError("layer_types name sliding_attention without a window", "sliding_window")
    return tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in types)


def windows_but_linear(hf: Any) -> tuple[int | None, ...]:
    """No layer has a window. Raises ConfigError unless each has full or linear attention."""
    return (None,) * len(layer_types(hf, "full_attention", "linear_attention"))


def layer_types(hf: Any, *known: str) -> list[str]:
    """The kind of each layer. Raises ConfigError unless each is one of the `known` ones."""
    types = list(hf.layer_types or ())
    if len(types) != hf.num_hidden_layers or not set(types) <= set(known):
        raise ConfigError(
            f"layer_types must name one of {', '.join(sorted(known))} for each of the "
            f"{hf.num_hidden_layers} layers, got {types}",
            "layer_types",
        )
    return types


def attention_types(hf: Any) -> list[str]:
    """The kind of attention of each layer. Raises ConfigError as `layer_types` does."""
    return layer_types(hf, "full_attention", "sliding_attention")


def rope_by_type(hf: Any) -> tuple[RopeParameters | None, ...]:
    """The rope parameters of each layer, by the layer's kind. Raises ConfigError."""
    types = attention_types(hf)
    missing = set(types).difference(hf.rope_parameters)
    if missing:
        message = f"rope_parameters say nothing of {', '.join(sorted(missing))}"
        raise ConfigError(message, "rope_parameters")
    return tuple(hf.rope_parameters[kind] for kind in types)


def rope_or_none(hf: Any) -> tuple[RopeParameters | None, ...]:
    """The rope parameters of each layer, None for those that `no_rope_layers` names with 0. Raises
    ConfigError."""
    rotates = hf.no_rope_layers[: hf.num_hidden_layers]
    if len(rotates) < hf.num_hidden_layers:
        message = f"no_rope_layers must say 0 or 1 for each of the {hf.num_hidden_layers} layers"
        raise ConfigError(message, "no_rope_layers")
    return tuple(hf.rope_parameters if rotated else None for rotated in rotates)


def check_lengths_kept(hf: Any) -> None:
    """Raises ConfigError for a type of rope that scales cos and sin, in a family whose norms of q
    and k follow rope but are computed before it."""
    kind = hf.rope_parameters.get("rope_type")
    if kind not in ("default", "linear", "llama3"):
        message = f"rope type {kind!r} is not served for {hf.model_type}, where norms follow it"
        raise ConfigError(message, "rope_parameters")


def linear_layers(hf: Any, called: str = "linear_attention") -> tuple[bool, ...] | None:
    """Whether each layer has a recurrent state; None if none has. `called`: the name of such layers
    in `layer_types`. Raises ConfigError if all layers have one."""
    layers = tuple(kind == called for kind in hf.layer_types)
    if all(layers):
        raise ConfigError("layer_types names no full_attention, which is needed", "layer_types")
    return layers if any(layers) else None
