"""Real nodes of a fleet, in processes of their own behind cables that can be cut, and what can
happen to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import TimeoutExpired

from patience import PATIENCE_S
from quick_start import Forked, engine_of, start_weft
from tiny import ADAPTERS, BASE, ask

from weft.core.adapters import AdapterPart, AdapterRef, AdapterSource, sum_of
from weft.core.errors import WeftError
from weft.core.requests import EngineRequest
from weft.core.sampling import SamplingParams, StructuredOutputs
from weft.fleet.curve import read_fleet_key
from weft.fleet.fleet_client import FleetClient
from weft.fleet.members import Members
from weft.publishing import publish
from weft.text import load_tokenizer

FAULTS = (
    "engine killed",
    "engine stopped",
    "node killed",
    "node stopped",
    "drained",
    "link cut",
    "registry away",
)
NAMES = ("caesar", "numeronym", "reverse")
SEATS = 16
"""How many requests a node runs at a time."""
AGAIN_S = 0.2
"""The pause before a node that has ended is started again."""
STOPPED_S = 1.0
"""For how long a process is stopped, a node drained, a link cut, the registry away."""


def free_port() -> int:
    """One of those that systems do not give to connections, so that it stays free for a while."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Cable:
    """Carries connections to a port, until it is cut."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def lay(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if not self.is_cut:
                far, near = await asyncio.open_connection("127.0.0.1", self.target)
                self._writers.add(near)
                await asyncio.gather(_carry(reader, near), _carry(far, writer))
        except OSError:
            pass
        finally:
            writer.close()

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def mend(self) -> None:
        self.is_cut = False

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


class RealNode:
    """`weft serve --no-api`, which is started again whenever it ends."""

    def __init__(self, number: int, folder: Path, registry: str) -> None:
        self.name = f"n{number}"
        self.cable = Cable(free_port())
        self._folder = folder
        self._registry = registry
        self._process: Forked | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._start()
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            assert self._process is not None
            while self._process.poll() is None:
                await asyncio.sleep(AGAIN_S / 4)
            await asyncio.sleep(AGAIN_S)
            await self._start()

    async def _start(self) -> None:
        args = ["serve", str(BASE), "--dtype", "float32", "--num-threads", "1"]
        args += ["--kv-cache-memory", "64M"]
        args += ["--no-api", "--fleet", str(self._folder / "nodes"), "--node-name", self.name]
        args += ["--fleet-key", str(self._folder / "key"), "--max-num-seqs", str(SEATS)]
        args += ["--fleet-listen", f"127.0.0.1:{self.cable.target}"]
        args += ["--registry", self._registry]
        args += ["--adapter-cache-dir", str(self._folder / f"{self.name}.images")]
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = await asyncio.to_thread(start_weft, args, log)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def engine_pid(self) -> int:
        return engine_of(self.pid)

    async def stop(self) -> None:
        """End it in good order."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, 30)
            except TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait, PATIENCE_S)
        await self.cable.close()


@dataclass
class Outcome:
    """What became of a stream."""

    failed: str = ""
    tokens: tuple[int, ...] = ()
    num_logprobs: int = 0
    largest_gap_s: float = 0.0
    whys: tuple[str, ...] = ()
    """Why it was placed, each time."""


class RealFleet:
    """Nodes and a client of them all, in this process."""

    def __init__(self, num_nodes: int, folder: Path, registry: str | None = None) -> None:
        """`registry`: None for a folder, which may be away for a while."""
        (folder / "key").write_text("tests " * 10)
        self._store = folder / "registry.store"
        self._store.mkdir()
        (folder / "registry").symlink_to(self._store)
        self._registry = registry or str(folder / "registry")
        self.nodes = [RealNode(number, folder, self._registry) for number in range(num_nodes)]
        self._tokenizer = load_tokenizer(str(BASE))  # it takes long, and holds up the event loop
        self.client = FleetClient()
        self._folder = folder
        self.refs: list[AdapterRef | None] = [None]

    async def start(self) -> None:
        for node in self.nodes:
            await node.cable.lay()
        where = self._folder / "nodes"
        where.write_text("".join(f"127.0.0.1:{node.cable.port}\n" for node in self.nodes))
        for node in self.nodes:
            await node.start()
        key = read_fleet_key(self._folder / "key")
        self.client.helpers.append(Members(str(where), key, "", self.client))
        await self.until_whole()
        for name in NAMES:  # from a folder that no node has: it is in the registry alone
            version = await asyncio.to_thread(publish, self._registry, name, ADAPTERS[name])
            place = str(self._folder / "elsewhere" / name)
            source = AdapterSource(place, version.digest, listing=version.listing)
            info = await self.client.hold(source, name)
            self.refs.append(AdapterRef(name, 1, info.digest))

    @property
    def num_begun(self) -> int:
        """Open streams that have output."""
        return sum(1 for live in self.client._live.values() if live.output)

    def whole(self) -> list[RealNode]:
        """The nodes that take requests."""
        usable = {node.name for node in self.client._usable()}
        return [node for node in self.nodes if node.name in usable]

    async def until_whole(self) -> None:
        """Wait until all nodes take requests."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.whole()) < len(self.nodes):
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self.client.close()
        self.client.check()
        await asyncio.gather(*(node.stop() for node in self.nodes))

    def requests(self, count: int, length: int) -> list[EngineRequest]:
        """Distinct requests of all kinds."""
        wild = SamplingParams(temperature=1.5, ignore_eos=True, max_tokens=length)
        form = StructuredOutputs(regex="([a-c]x[0-9]){3,9}")
        kinds = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
            replace(wild, top_k=40, top_p=0.9, min_p=0.001),
            replace(wild, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.5),
            replace(wild, ignore_eos=False, min_tokens=5, stop_token_ids=tuple(range(40, 60))),
            replace(wild, logprobs=2, prompt_logprobs=1),
            replace(wild, ignore_eos=False, structured_outputs=form),
            replace(wild, logit_bias={20: 5.0, 21: -100.0}, bad_words=("ab",)),
        ]
        bad, base = ((30, 31), (32,)), self.refs[0]
        both = [AdapterPart(ref, 0.5) for ref in self.refs[1:3] if ref is not None]
        targets = [(base, ()), *((ref, ()) for ref in self.refs[1:]), sum_of(both)]
        words = ["hello", "weaver", "loom", "thread", "shuttle"]
        return [
            EngineRequest(
                f"request {i}",
                self._tokenizer.chat(ask(words[i % len(words)] * (1 + i % 3))),
                kinds[i % len(kinds)],
                targets[i % len(targets)][0],
                parts=targets[i % len(targets)][1],
                bad_token_ids=bad if kinds[i % len(kinds)].bad_words else (),
                tenant=("", "a", "b")[i % 3],
                seed=i,
            )
            for i in range(count)
        ]

    async def read(self, request: EngineRequest) -> Outcome:
        """Read a stream to its end."""
        tokens: list[int] = []
        num_logprobs, last_s, gap_s, failed = 0, time.monotonic(), 0.0, ""
        try:
            async for event in self.client.generate(request):
                now = time.monotonic()
                if tokens:
                    gap_s = max(gap_s, now - last_s)
                last_s = now
                tokens += event.token_ids
                num_logprobs += len(event.logprobs or ())
                if event.error is not None:
                    failed = event.error[1]
        except WeftError as error:
            failed = error.message
        whys = tuple(str(each["why"]) for each in self.client.explain(request.request_id))
        return Outcome(failed, tuple(tokens), num_logprobs, gap_s, whys)

    async def inflict(self, fault: str, node: RealNode) -> None:
        """Let something happen to a node, and end it again. The node need not be whole by then."""
        if fault in ("engine killed", "node killed"):
            os.kill(node.engine_pid if fault == "engine killed" else node.pid, signal.SIGKILL)
        elif fault in ("engine stopped", "node stopped"):
            pid = node.engine_pid if fault == "engine stopped" else node.pid
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
        elif fault == "registry away":
            await self._registry_away()
        elif fault == "drained":
            self.client.drain(node.name)
            await asyncio.sleep(STOPPED_S)
            with contextlib.suppress(WeftError):  # it was lost meanwhile, and comes back undrained
                self.client.drain(node.name, False)
        else:
            assert fault == "link cut"
            node.cable.cut()
            await asyncio.sleep(STOPPED_S)
            node.cable.mend()

    async def _registry_away(self) -> None:
        """For a while there is a file where the registry should be: whoever starts meanwhile can't
        make one there."""
        registry, aside = self._folder / "registry", self._folder / "aside"
        aside.touch()
        aside.replace(registry)
        await asyncio.sleep(STOPPED_S)
        aside.symlink_to(self._store)
        aside.replace(registry)
