"""The report of an engine's load, from which others decide where requests go.

Adapters and prefixes are named by short keys, 64 bits of their digests, as a report lists thousands
of them. If two share a key, a request goes to a worse node now and then; nothing else happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_RESIDENT = 1_024
MAX_HOST = 4_096
MAX_PREFIXES = 4_096
"""The most keys of each kind that a report has."""
MAX_STRANDED = 16


def adapter_key(digest: str) -> int:
    """The key of an adapter version."""
    return int(digest[:16], 16)


@dataclass(frozen=True, slots=True)
class Costs:
    """What an engine's work takes, in seconds, as the engine measures it while it runs.

        a step  = step_s + row_s * rows + adapter_s * distinct adapters + token_s * prompt tokens
        a load  = load_s + host_byte_s * bytes (from the host), or disk_byte_s * bytes (from disk)

    Until enough was measured, the values given here hold.
    """

    step_s: float = 4e-3
    row_s: float = 2e-5
    """For each sequence that gets a token in the step."""
    adapter_s: float = 3e-5
    """For each distinct adapter in the step."""
    token_s: float = 2e-5
    """For each token of a prompt that the step computes."""
    load_s: float = 1e-3
    host_byte_s: float = 4e-11
    disk_byte_s: float = 4e-10


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's load between two steps."""

    max_seats: int = 0
    """Requests that can run at a time."""
    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    """Tokens of waiting and running requests that are still to be computed before their next
    token: what is ahead of a prompt that comes now."""
    kv_usage: float = 0.0
    """Blocks in use over all blocks, 0 to 1."""
    free_adapter_bytes: int = 0
    """Free adapter memory. An adapter that does not fit into it evicts others."""
    running_adapters: frozenset[int] = frozenset()
    """Keys of the adapters in the batch."""
    loading: dict[int, float] = field(default_factory=dict)
    """Loads under way: for how many seconds, by key."""
    resident: frozenset[int] = frozenset()
    """Keys of adapters on the device, at most MAX_RESIDENT."""
    host: frozenset[int] = frozenset()
    """Keys of adapters on the host, at most MAX_HOST, the newest ones."""
    prefixes: frozenset[int] = frozenset()
    """Keys of cached prefixes, at most MAX_PREFIXES, those used last; see
    `weft.schedule.sketch`."""
    costs: Costs = Costs()
    stranded: tuple[str, ...] = ()
    """Ids of requests that lost their KV blocks to others and wait to be computed again, at most
    MAX_STRANDED, the youngest ones."""

    @property
    def num_open(self) -> int:
        return self.num_running + self.num_waiting

    @property
    def free_seats(self) -> int:
        return max(self.max_seats - self.num_open, 0)
