"""A fleet of engines that only pretend to compute, over a network that loses, delays and cuts."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.errors import AdapterUnavailable, EngineDead, RegistryUnavailable, to_wire
from weft.core.load import EngineLoad, adapter_key
from weft.core.messages import (
    Abort,
    Command,
    Hold,
    Release,
    Reply,
    Report,
    SetTenants,
    Started,
    Stop,
    Submit,
    Tokens,
)
from weft.core.requests import EngineRequest, TokenEvent, TokenLogprob
from weft.core.stats import EngineInfo
from weft.fleet.client import LinkClient
from weft.fleet.fleet_client import FleetClient
from weft.fleet.node import RemoteNode
from weft.fleet.reports import (
    NodeReport,
    ReportReceiver,
    ReportSender,
    ReportUpdate,
)

INFO = EngineInfo("m", "Tiny", "float32", "cpu", 4096, 1000, 100, 16, 8, 8, 1 << 20, 1)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only while nothing else is to be done, and then at once."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now_s = max(self.now_s, self._scheduled[0]._when)
        super()._run_once()


def token_of(request: EngineRequest, position: int) -> int:
    """The token that any engine makes of a request there."""
    said = f"{request.prompt_ids} {request.seed} {request.adapter} {position}"
    return hashlib.blake2b(said.encode(), digest_size=1).digest()[0]


def stream_of(request: EngineRequest) -> list[int]:
    """All tokens of a request that nothing disturbs."""
    return [token_of(request, i) for i in range(request.params.max_tokens)]


class PretendedEngine:
    """An engine that answers over one link at a time, with a token of each request in each step."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self.epoch = 0
        self._rng = rng
        self.link: PretendedLink | None = None
        self.draining = self.idle = False
        self.stranded: tuple[str, ...] = ()
        self.kv_usage = 0.0
        self.controller = ""
        """The process that it names in its reports."""
        self.held: set[tuple[str, str]] = set()
        self.pinned: set[str] = set()
        """The digests whose last hold pinned them."""
        self.sources: list[AdapterSource] = []
        """The sources of all holds so far."""
        self.refuses: set[str] = set()
        """Digests that can't be read here."""
        self.registry_away = False
        """Whether content that is not held can't be loaded now."""
        self.running: dict[str, tuple[EngineRequest, int]] = {}
        """The requests with how much output they have."""
        self.charged = 0
        self.context = INFO.max_model_len
        """How many tokens it has room for in one request."""
        self.labels: dict[str, str] = {}
        """The labels that it reports from its next life on."""
        self._sender = ReportSender(name, 0)

    def begin(self) -> None:
        """Begin a new life, without anything of the one before."""
        self.epoch += 1
        self.running, self.held, self.pinned = {}, set(), set()
        self._sender = ReportSender(self.name, self.epoch, self.labels)

    def take(self, command: Command) -> None:
        match command:
            case Submit(request):
                digest = request.adapter.digest if request.adapter else None
                if digest is not None and digest not in {each for each, _ in self.held}:
                    error = to_wire(AdapterUnavailable("not loaded", "model"))
                    self._say(
                        Tokens(
                            [TokenEvent(request.request_id, [], finish_reason="error", error=error)]
                        )
                    )
                    return
                assert request.output_ids == stream_of(request)[: len(request.output_ids)]
                assert len(request.output_ids) < request.params.max_tokens
                assert len(request.prompt_ids) + len(request.output_ids) < self.context
                self.running[request.request_id] = request, len(request.output_ids)
            case Abort(request_id):
                self.running.pop(request_id, None)
            case Hold(call_id, source, holder, pinned):
                self.pinned.discard(source.digest or "")
                if pinned:
                    self.pinned.add(source.digest or "")
                self.sources.append(source)
                if source.digest in self.refuses:
                    error = to_wire(AdapterUnavailable("no such folder", "model"))
                    self._say(Reply(call_id, error=error))
                    return
                if self.registry_away:
                    error = to_wire(RegistryUnavailable("the registry does not answer"))
                    self._say(Reply(call_id, error=error))
                    return
                self.held.add((source.digest, holder))
                self._say(Reply(call_id, info=AdapterInfo(source.digest, source.path, 8, 100, ())))
            case Release(call_id, digest, holder):
                self.held.discard((digest, holder))
                self._say(Reply(call_id))
            case SetTenants() | Stop():
                pass
            case _:
                raise AssertionError(command)

    def step(self) -> None:
        """Make a token, or a few, of each request."""
        events = []
        for request_id, (request, made) in list(self.running.items()):
            most = min(request.params.max_tokens, self.context - len(request.prompt_ids))
            end = min(made + self._rng.choice((1, 1, 1, 3)), most)
            tokens = [token_of(request, i) for i in range(made, end)]
            ended = end == most
            first = made == len(request.output_ids)
            wanted = first and request.params.prompt_logprobs is not None
            logprobs = [None, *([TokenLogprob(0.0, 1, [])] * (len(request.prompt_ids) - 1))]
            events.append(
                TokenEvent(
                    request_id,
                    tokens,
                    finish_reason="length" if ended else None,
                    num_tokens=len(request.prompt_ids) + end,
                    prompt_logprobs=logprobs if wanted and not request.output_ids else None,
                    queue_s=0.1 if first else None,
                )
            )
            self.running[request_id] = request, end
            if ended:
                del self.running[request_id]
        if events:
            self._say(Tokens(events))

    def report(self) -> None:
        self._say(self._update())

    def whole(self) -> ReportUpdate:
        self._update()
        update = self._sender.whole()
        assert update is not None
        return update

    def _update(self) -> ReportUpdate:
        return self._sender.update(self._load(), self.draining, self.idle, self.controller)

    def _load(self) -> EngineLoad:
        digests = frozenset(adapter_key(digest) for digest, _ in self.held)
        return EngineLoad(
            4,
            len(self.running),
            resident=digests,
            kv_usage=self.kv_usage,
            stranded=self.stranded,
        )

    def _say(self, report: Report | ReportUpdate) -> None:
        if self.link is not None:
            self.link.up.append(report)


class PretendedLink:
    """What `TcpLink` is to a client. Messages wait in `down` and `up` until they are carried."""

    def __init__(self, engine: PretendedEngine, client: LinkClient) -> None:
        self.node = engine.name
        self.address = f"{engine.name}:7070"
        self.receiver = ReportReceiver()
        self.on_report: Callable[[ReportUpdate], None] = lambda _: None
        self.up: deque[Any] = deque()
        self.down: deque[Command] = deque()
        self.engine = engine
        self.client = client
        self.cut = False

    @property
    def report(self) -> NodeReport | None:
        return self.receiver.report

    def send(self, command: Command) -> None:
        self.down.append(command)

    def drain(self, draining: bool) -> None:
        self.engine.draining = draining

    def rest(self, idle: bool) -> None:
        self.engine.idle = idle

    def tick(self) -> None: ...

    async def join(self, timeout_s: float) -> None: ...

    def carry(self, most: int = 1 << 30) -> None:
        """Deliver at most `most` messages in each direction."""
        for _ in range(min(most, len(self.down))):
            command = self.down.popleft()
            if not self.cut and self.engine.link is self:
                self.engine.take(command)
        for _ in range(min(most, len(self.up))):
            said = self.up.popleft()
            if self.cut:
                continue
            if isinstance(said, ReportUpdate):
                self.receiver.receive(said)
                self.on_report(said)
            else:
                self.client.dispatch(said)


class LossyFleet:
    """A FleetClient over pretended engines."""

    def __init__(self, num_nodes: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.client = FleetClient()
        self.engines = [PretendedEngine(f"n{i}", self.rng) for i in range(num_nodes)]
        self.links: dict[str, PretendedLink] = {}
        """By node: the newest link."""
        self.old: list[PretendedLink] = []
        """Links that are given up, of which messages may still come."""

    async def join(self, engine: PretendedEngine, info: EngineInfo = INFO) -> None:
        """Link to an engine as `Members` does."""
        client = LinkClient()
        link = PretendedLink(engine, client)
        client.dispatch(Started(replace(info, max_model_len=engine.context)))
        await client.start(link)
        engine.link = link
        update = engine.whole()
        link.receiver.receive(update)
        node = RemoteNode(client, link)
        self.links[engine.name] = link
        self.client.join(node, update)
        link.on_report = lambda update: self.client.reported(node, update)
        node.lose = lambda error: self._lose(node, link, error)
        link.lose = node.lose

    def _lose(self, node: RemoteNode, link: PretendedLink, error: EngineDead) -> None:
        link.client.died(error)
        self.client.lost(node)
        self.links.pop(node.name, None)
        self.old.append(link)

    def lose(self, name: str, message: str, killed: bool) -> None:
        """A node's link is lost."""
        self.links[name].lose(EngineDead(message, killed=killed))
