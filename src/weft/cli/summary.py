"""The lines that `weft serve` prints when it is ready."""

from __future__ import annotations

from collections.abc import Mapping

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from weft.core.stages import in_words
from weft.core.stats import EngineInfo
from weft.registry import AdapterRegistry
from weft.registry.shared import SharedRegistry

MAX_SHOWN = 12
"""How many adapters are named."""


def summary(
    info: EngineInfo,
    registry: AdapterRegistry,
    url: str | None,
    page: bool,
    metrics_url: str | None,
    shares: str | None,
    took: str,
) -> Panel:
    """What a newcomer wants to know of a server that is ready. `shares` tells of the registry that
    it shares with others, if there is one; `page`: whether it serves the page; `took`: how long
    the start took."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    adapters = list(registry.names())
    rows.add_row("Model", Text(", ".join(registry.base_names)))
    rows.add_row("", f"{info.architecture}, {_count(info.num_parameters)} parameters, {info.dtype}")
    rows.add_row("Device", info.device)
    tokens = info.num_blocks * info.block_size
    rows.add_row("KV cache", f"{tokens:,} tokens; {info.max_model_len:,} in one request")
    none = "none yet" if shares is None else "loaded when they are first used"
    rows.add_row("Adapters", Text(_names(adapters) if adapters else none))
    gib = info.adapter_memory_bytes / 2**30
    rows.add_row("", f"{gib:.3g} GiB of memory, up to rank {info.max_lora_rank}")
    if shares is not None:
        rows.add_row("Registry", Text(shares))
    rows.add_row("Start", took)
    if url is not None:
        rows.add_row("API", _link(url, "/v1"))
    if url is not None and page:
        rows.add_row("Page", _link(url))
    if metrics_url is not None:
        rows.add_row("Metrics", _link(metrics_url, "/metrics"))
    return Panel(rows, title="Weft is ready", title_align="left", expand=False)


def start_in_words(took_s: float, engine_s: Mapping[str, float] | None) -> str:
    """How long a start took, and each stage of its own engine; None: it has none."""
    engine = "" if engine_s is None else f", of which the engine took {in_words(engine_s)}"
    return f"{took_s:.1f} s{engine}"


def num_shared(shared: SharedRegistry) -> int:
    """How many adapters a registry has."""
    return sum(entry.removed_at is None for entry in shared.state.names.values())


def _link(url: str, path: str = "") -> Text:
    return Text.assemble((url, f"link {url}"), path)


def _names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return f"{len(names)}: {', '.join(names[:MAX_SHOWN])}{more}"


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)
