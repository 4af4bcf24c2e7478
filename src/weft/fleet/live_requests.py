"""Records that a fleet's client keeps of its open requests and of the nodes."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from weft.core.adapters import AdapterInfo
from weft.core.errors import EngineDead
from weft.core.load import adapter_key
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.stats import EngineInfo
from weft.fleet.node import Node
from weft.fleet.route import Routed, Router
from weft.fleet.view import RoutedRequest
from weft.metrics.logs import request_id_var
from weft.schedule.cache import NEVER, Holding
from weft.schedule.sequence import find_invocation
from weft.schedule.sketch import prefix_keys

MAX_EXPLAINED = 1_000
"""How many requests' decisions are remembered."""
ROOMY = 0.9
"""The fraction of its KV blocks that a node may use after it has taken a request for which another
node has no memory. The rest is for what runs there, which grows too."""
MAX_RELIEVED = 4
"""A request that has moved so often because its memory was taken stays where it is."""
TURN_S = 1.0
"""How many seconds one request that begins anew on another node may hold up the others."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a request went to a node."""

    at: float
    """Seconds since 1970."""
    why: str
    """Why it was to be placed."""
    num_output: int
    """How many tokens it had by then."""
    routed: Routed
    pins: str = ""
    """The labels of its adapters that say which nodes keep them."""
    http_id: str = field(default_factory=lambda: request_id_var.get() or "")
    """The id of the HTTP request that it is a part of; "" if there is none."""


class Decisions:
    """Owner of what was decided for the last requests."""

    def __init__(self) -> None:
        self._by_request: OrderedDict[str, list[Decision]] = OrderedDict()

    def add(self, request_id: str, decision: Decision) -> None:
        self._by_request.setdefault(request_id, []).append(decision)
        if len(self._by_request) > MAX_EXPLAINED:
            self._by_request.popitem(last=False)

    def explain(self, request_id: str, router: Router) -> list[dict[str, Any]]:
        """Why a request went where it went, each time that it was placed; empty if that is not
        known any more. The id is that of the answer, or of the HTTP request; each of several
        prompts or choices has a number behind the answer's. Costs are in seconds."""
        return [
            {
                "request_id": key,
                "time": each.at,
                "node": each.routed.node,
                "why": each.why,
                "output_tokens": each.num_output,
                "pins": each.pins,
                "costs": router.explain(each.routed),
            }
            for key, decisions in self._by_request.items()
            for each in decisions
            if request_id in (key, key.rpartition("-")[0], each.http_id)
        ]


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that is open."""

    request: EngineRequest
    output: list[int]
    node: Node | None = None
    attempt: RoutedRequest | None = None
    """Its newest attempt as the router knows it, with the attempt's id."""
    attempts: int = 0
    deaths: int = 0
    why: str = "the request is new"
    """Why it is to be placed now."""
    moving: str | None = None
    """Why it was taken from its node; None: it was not."""
    shunned: frozenset[str] = frozenset()
    """The nodes that had no memory for it when it left one of them. It goes there only if no other
    can have it."""
    lacking: set[str] = field(default_factory=set)
    """The names of nodes that can't load its adapter."""
    num_lost: int = 0
    """How often it has lost its node."""
    num_relieved: int = 0
    """How often it moved because its node had no memory for it."""
    num_refused: int = 0
    """How often a node that was thought to have its adapter no longer had it."""
    leaving: bool = False
    """It is to leave its node, and waits for its turn to begin anew elsewhere."""
    turn: ResumeTurn | None = None
    """That turn, once it has it."""


class ResumeTurn:
    """A request's turn to begin anew on another node. Few requests have one at a time, so that the
    death of a node does not make a storm of prompts. It lasts until `end`, at most TURN_S."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._ended = False
        self._timer = asyncio.get_running_loop().call_later(TURN_S, self.end)

    @classmethod
    async def take(cls, turns: asyncio.Semaphore) -> ResumeTurn:
        await turns.acquire()
        return cls(turns)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._timer.cancel()
            self._turns.release()


def state_of(node: Node) -> str:
    report = node.report
    if report is None:
        return "down"
    return "draining" if report.draining else "idle" if report.idle else "up"


def has_room(node: Node, live: LiveRequest) -> bool:
    """Whether a node can take a request without taking memory from others."""
    report, info = node.report, node.info
    num_tokens = len(live.request.prompt_ids) + len(live.output)
    if report is None or report.draining or report.idle:
        return False
    added = num_tokens / (info.num_blocks * info.block_size)
    return report.load.free_seats > 0 and report.load.kv_usage + added <= ROOMY


def too_short(live: LiveRequest, nodes: Mapping[str, Node], longest: int) -> frozenset[str]:
    """The names of the nodes whose context has no room for a request's prompt and `max_tokens`.
    `longest` is the context of the API that made it. A request that may fill that needs room for no
    more than it has by now, and ends where its node's context does."""
    request = live.request
    needed = len(request.prompt_ids) + (request.params.max_tokens or longest)
    if needed >= longest:
        needed = len(request.prompt_ids) + len(live.output) + (request.pooling is None)
    return frozenset(name for name, node in nodes.items() if node.info.max_model_len < needed)


def to_relieve(
    node: Node, nodes: Mapping[str, Node], lives: Iterable[LiveRequest]
) -> LiveRequest | None:
    """The request that is to leave a node without memory for it: the first of `lives` (the youngest
    first) that may move, and for which another node has room. If one is not enough, the next goes
    with the node's next report."""
    stranded = node.report.load.stranded if node.report else ()
    for live in lives if stranded else ():
        attempt = live.attempt
        if live.node is not node or attempt is None or attempt.request_id not in stranded:
            continue
        if live.leaving or live.num_relieved >= MAX_RELIEVED:
            continue
        full = {each.name for each in nodes.values() if each is node or not has_room(each, live)}
        if full != nodes.keys():
            live.shunned, live.num_relieved = frozenset(full), live.num_relieved + 1
            return live
    return None


def holders_of(nodes: Mapping[str, Node], digest: str) -> list[str]:
    """The addresses of the nodes that have an adapter, on the host or the device; for any
    thread."""
    key = adapter_key(digest)
    reports = [(node, node.report) for node in list(nodes.values())]
    return [
        node.address
        for node, report in reports
        if report and (key in report.load.host or key in report.load.resident)
    ]


def described(node: Node, own: bool, num_live: int) -> dict[str, object]:
    report = node.report
    facts: dict[str, object] = {"node": node.name, "own": own, "requests_from_here": num_live}
    if report is None:
        return {**facts, "state": state_of(node)}
    load = report.load
    return {
        **facts,
        "state": state_of(node),
        "labels": report.labels,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "seats": load.max_seats,
        "queued_tokens": load.queued_tokens,
        "kv_usage": load.kv_usage,
        "adapters": {
            "running": len(load.running_adapters),
            "device": len(load.resident),
            "host": len(load.host),
            "loading": len(load.loading),
        },
        "costs": asdict(load.costs),
    }


def all_described(
    nodes: Iterable[Node], own: Node | None, num_live: Counter[str], lost_at: Mapping[str, float]
) -> list[dict[str, object]]:
    """What is known of each node, and of those that were lost (`FleetFigures.lost_at`). `num_live`:
    how many requests from here each has."""
    found = [described(node, node is own, num_live[node.name]) for node in nodes]
    for name, at in lost_at.items():
        since = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
        gone = {"node": name, "own": False, "requests_from_here": 0, "state": "down"}
        found.append({**gone, "since": since.replace("+00:00", "Z")})
    return found


def routed_request(
    live: LiveRequest, attempt: str, adapter_info: AdapterInfo | None, block_size: int
) -> RoutedRequest:
    """What the router needs to know of the next attempt of a request, which gets this id."""
    request = live.request
    tokens = array("Q", [*request.prompt_ids, *live.output])
    adapter, active_from = request.adapter, NEVER if request.adapter is None else 0
    if adapter_info is not None and adapter_info.invocation_token_ids:
        found = find_invocation(request.prompt_ids, adapter_info.invocation_token_ids)
        adapter, active_from = (None, NEVER) if found is None else (adapter, found)
    chain = Holding(adapter.digest if adapter else None, active_from, request.cache_salt)

    def key_of(num_blocks: int) -> bytes:
        return chain.key(tokens, num_blocks - 1, block_size)

    return RoutedRequest(
        attempt,
        len(tokens),
        adapter_key(adapter.digest) if adapter else 0,
        adapter_info.num_bytes if adapter_info else 0,
        tuple(prefix_keys(key_of, len(tokens), block_size)),
        request.tenant,
    )


def kind_of(info: EngineInfo) -> str:
    """What must be the same for all engines of a fleet, in words."""
    shape = f"{info.num_parameters} parameters, {info.vocab_size} tokens"
    quantized = f" quantized to {info.quantization}" if info.quantization else ""
    weights = f"weights {info.weights}" if info.weights else "random weights"
    return f"{info.architecture} ({shape}) in {info.dtype}{quantized} with {weights}"


def add_to_output(live: LiveRequest, event: TokenEvent) -> None:
    """Add an event's tokens to the output that a request has. Raises EngineDead if they don't come
    right after it: the request then goes on, from what it has, as if its node were lost."""
    num_tokens = len(live.request.prompt_ids) + len(live.output) + len(event.token_ids)
    if event.token_ids and event.num_tokens != num_tokens:
        raise EngineDead("tokens are missing, or came twice", killed=True)
    live.output += event.token_ids


def passed_on(live: LiveRequest, event: TokenEvent) -> TokenEvent:
    """An event as the reader gets it: figures that are told once are the first attempt's."""
    event = event._replace(request_id=live.request.request_id)
    if live.attempts > 1:
        event = event._replace(num_cached_tokens=0, queue_s=None, adapter_wait_s=None)
    return event
