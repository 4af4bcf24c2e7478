"""Contents that come from other nodes, which may lie, break off, be slow, or lack them."""

from __future__ import annotations

import asyncio
import io
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore
from packed_adapters import adapter, digest, written
from patience import PATIENCE_S, wait_until
from test_links import PretendedSupervisor, same
from zmq.auth.thread import ThreadAuthenticator

from weft.core.errors import RegistryUnavailable
from weft.core.files import CONFIG_FILE
from weft.fleet import lender, peers
from weft.fleet.curve import DOMAIN, FleetKey
from weft.fleet.lender import ContentLender
from weft.fleet.node import OwnNode
from weft.fleet.peers import MAX_ASKED, PeerContents, choose_peers
from weft.fleet.wire import DOWN, PIECES, FilePiece, GetPiece
from weft.registry.blobs import Blobs
from weft.registry.contents import LISTING, Contents, listing_of, parse_listing

FILES = adapter(chat_template__jinja=b"{{ x }}" * 50)
DIGEST = digest(FILES)
KEY = FleetKey(*zmq.curve_keypair())
ADDRESSES = [f"10.0.0.{number}:7070" for number in range(8)]


@given(st.lists(st.sampled_from(ADDRESSES)), st.sets(st.sampled_from(ADDRESSES)), st.text())
def test_only_some_of_the_usable_nodes_are_asked(
    found: list[str], avoided: set[str], asker: str
) -> None:
    chosen = choose_peers("content", asker, ["", *found], avoided)
    usable = set(found) - avoided
    assert set(chosen) <= usable and len(chosen) == min(len(usable), MAX_ASKED)
    assert chosen == choose_peers("content", asker, reversed(found), avoided)


def test_not_all_ask_the_same_node_first() -> None:
    first = {choose_peers("content", str(asker), ADDRESSES, ())[0] for asker in range(50)}
    assert len(first) > len(ADDRESSES) / 2


def test_only_files_of_contents_can_be_fetched(tmp_path: Path) -> None:
    contents = Contents(tmp_path)
    (tmp_path / "secret").write_bytes(b"secret")
    with contents.stage() as stage:
        folder = contents.keep(written(stage / "a", FILES))
    key = Path(folder.path).name
    assert contents.read_piece(key, CONFIG_FILE, 1, 5) == FILES[CONFIG_FILE][1:6]
    assert contents.read_piece(key, CONFIG_FILE, 1 << 40, 5) == b""
    assert contents.read_piece(key, CONFIG_FILE, -1, 5) is None
    for outside in ((key, "../../secret"), ("..", "secret"), (f"{key}/..", "x")):
        assert contents.read_piece(*outside, 0, 5) is None
    assert contents.read_piece(key, "tokenizer.json", 0, 5) is None


# -- fetching ------------------------------------------------------------------------------------


class CountingStore(MemoryStore):
    """Counts the files that are downloaded from it."""

    num_files = 0
    away = False

    def get_file(self, key: str, file: BinaryIO) -> bool:
        self.get("")
        self.num_files += 1
        return super().get_file(key, file)

    def get(self, key: str) -> bytes | None:
        if self.away:
            raise RegistryUnavailable("the bucket is away", "registry")
        return super().get(key)


@pytest.fixture
def store() -> CountingStore:
    store = CountingStore()
    Blobs(store).put(FILES)
    return store


@contextmanager
def asking(blobs: Blobs, key: FleetKey) -> Iterator[Blobs]:
    """Let a node ask others."""
    blobs.peers = found = PeerContents(key, "me")
    yield blobs
    asyncio.run(found.close())


@pytest.fixture
def blobs(store: CountingStore, tmp_path: Path) -> Iterator[Blobs]:
    """Those of a node that has nothing yet."""
    with asking(Blobs(store, Contents(tmp_path / "mine")), KEY) as blobs:
        yield blobs


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PIECE_BYTES", 100)
    monkeypatch.setattr(lender, "PIECE_BYTES", 100)


def is_whole(blobs: Blobs, *holders: str, sha256: str = "") -> bool:
    with blobs.open(DIGEST, holders, sha256) as folder:
        return {name: bytes(folder.read(name, 1 << 20) or b"") for name in FILES} == FILES


def num_bytes() -> int:
    return sum(map(len, FILES.values()))


async def test_another_node_spares_the_store(
    store: CountingStore, blobs: Blobs, tmp_path: Path
) -> None:
    theirs = Contents(tmp_path / "theirs")
    Blobs(store, theirs).open(DIGEST).close()
    before = store.num_files
    own = OwnNode("a", PretendedSupervisor(), "127.0.0.1:0", KEY, same, theirs)
    address = f"127.0.0.1:{own.listener.port}"
    try:
        blobs.holders = lambda asked: [address] if asked == DIGEST else []
        assert await asyncio.to_thread(is_whole, blobs)
    finally:
        await own.close()
    assert store.num_files == before
    assert blobs.fetched == {"peers": num_bytes(), "store": 0}


async def test_pieces_are_sent_after_one_that_can_not_be_asked_for(tmp_path: Path) -> None:
    contents = Contents(tmp_path)
    with contents.stage() as stage:
        contents.keep(written(stage / "a", FILES)).close()
    (key,) = (path.name for path in (tmp_path / "contents").iterdir())
    sent: asyncio.Queue[bytes | None] = asyncio.Queue()
    lends = ContentLender(contents, lambda _, piece: sent.put_nowait(piece.data))
    serving = asyncio.create_task(lends.serve())
    for start in (1 << 63, 0):
        lends.ask(b"me", GetPiece(key, CONFIG_FILE, start))
    async with asyncio.timeout(PATIENCE_S):
        assert await sent.get() is None and await sent.get()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


LISTED = listing_of({name: io.BytesIO(content) for name, content in FILES.items()})


async def test_the_list_of_files_comes_from_another_node_too(
    store: CountingStore, blobs: Blobs, tmp_path: Path
) -> None:
    """Nothing is asked of a bucket that is away, and what is here by then is served without it."""
    theirs = Contents(tmp_path / "theirs")
    Blobs(store, theirs).open(DIGEST).close()
    store.away = True
    own = OwnNode("a", PretendedSupervisor(), "127.0.0.1:0", KEY, same, theirs)
    address = f"127.0.0.1:{own.listener.port}"
    try:
        for known in ("", "0" * 64):
            with pytest.raises(RegistryUnavailable):
                await asyncio.to_thread(is_whole, blobs, address, sha256=known)
        assert await asyncio.to_thread(is_whole, blobs, address, sha256=LISTED.sha256)
    finally:
        await own.close()
    assert blobs.fetched == {"peers": num_bytes(), "store": 0}
    assert is_whole(blobs, sha256=LISTED.sha256)
    with pytest.raises(RegistryUnavailable):
        is_whole(blobs, sha256="0" * 64)


def other_listing() -> bytes:
    """A list whose files are what it says, and are of the same content by its digest, but not what
    was published."""
    files = {**FILES, "chat_template.jinja": b"evil"}
    listing = listing_of({name: io.BytesIO(content) for name, content in files.items()})
    assert listing.digest == DIGEST and listing != LISTED
    return msgspec.json.encode(listing)


@pytest.mark.parametrize("said", [other_listing(), b"", b"{", b"x" * 1000, None])
def test_no_other_list_is_believed(
    said: bytes | None, store: CountingStore, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is asked, and while it is away there is no such adapter."""

    def answer(wanted: GetPiece, n: int) -> FilePiece:
        if wanted.name != LISTING:
            return FilePiece(right(wanted))
        return FilePiece(None if said is None else said[wanted.start : wanted.start + 100])

    store.away = True
    with peer(answer) as (address, asked):
        with pytest.raises(RegistryUnavailable):
            is_whole(blobs, address, sha256=LISTED.sha256)
        assert asked and {each.name for each in asked} == {LISTING}
        store.away = False
        assert is_whole(blobs, address, sha256=LISTED.sha256)


@given(st.integers(0, 10_000), st.binary(max_size=3))
def test_a_list_is_the_registrys_to_the_byte(at: int, put: bytes) -> None:
    said = msgspec.json.encode(LISTED)
    at %= len(said)
    changed = said[:at] + put + said[at + len(put) :]
    assert (parse_listing(changed, DIGEST, LISTED.sha256) is not None) == (changed == said)
    assert parse_listing(said, "0" * 64, LISTED.sha256) is None


Answer = Callable[[GetPiece, int], FilePiece | bytes | None]
"""What a node makes of the n-th question; None: nothing."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that sends something is not taken to be slow, unless a test says so."""
    monkeypatch.setattr(peers, "PIECE_S", PATIENCE_S)
    monkeypatch.setattr(peers, "GRACE_S", PATIENCE_S)


@contextmanager
def peer(answer: Answer) -> Iterator[tuple[str, list[GetPiece]]]:
    """The address of a node that answers so, and what it was asked."""
    context: Any = zmq.Context()
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(DOMAIN, KEY)
    socket = context.socket(zmq.ROUTER)
    KEY.lock(socket, server=True)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    asked: list[GetPiece] = []
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            if not socket.poll(10):
                continue
            address, message = socket.recv_multipart()
            wanted = DOWN.decode(message)
            assert isinstance(wanted, GetPiece)
            asked.append(wanted)
            found = answer(wanted, len(asked))
            if found is not None:
                said = found if isinstance(found, bytes) else PIECES.encode(found)
                socket.send_multipart([address, said])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{port}", asked
    finally:
        ended.set()
        thread.join()
        socket.close(0)
        guard.stop()
        context.term()


def right(wanted: GetPiece) -> bytes:
    return FILES[wanted.name][wanted.start : wanted.start + 100]


BAD: dict[str, Answer] = {
    "lies": lambda wanted, n: FilePiece(bytes(len(right(wanted)))),
    "breaks off": lambda wanted, n: FilePiece(right(wanted)) if n < 3 else None,
    "says nothing": lambda wanted, n: None,
    "sends more": lambda wanted, n: FilePiece(right(wanted) + b"x"),
    "sends less": lambda wanted, n: FilePiece(right(wanted)[:-1]),
    "sends something else": lambda wanted, n: b"something else",
}


@pytest.mark.parametrize("how", BAD)
def test_a_node_that_fails_is_avoided(
    how: str,
    store: CountingStore,
    blobs: Blobs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has sent is never served: the store is asked."""
    with peer(BAD[how]) as (address, asked):
        if how in ("breaks off", "says nothing"):
            monkeypatch.setattr(peers, "PIECE_S", 0.2)
            look, looks = PeerContents._next, itertools.count(1)

            def look_late(socket: Any) -> bytes:
                """The time for a piece begins when the node has been asked for it."""
                number = next(looks)
                wait_until(lambda: len(asked) >= number)
                return look(socket)

            monkeypatch.setattr(PeerContents, "_next", staticmethod(look_late))
        assert is_whole(blobs, address)
        assert asked and blobs.fetched == {"peers": 0, "store": num_bytes()}
        num_asked = len(asked)
        blobs._contents = Contents(tmp_path / "others")
        assert is_whole(blobs, address)
        assert len(asked) == num_asked


def test_a_slow_node_is_given_up(
    store: CountingStore, blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MIN_BYTES_PER_S", 1 << 60)
    monkeypatch.setattr(peers, "GRACE_S", 0.0)
    with peer(lambda wanted, n: FilePiece(right(wanted))) as (address, asked):
        assert is_whole(blobs, address)
    assert asked and blobs.fetched["peers"] == 0


def test_a_node_that_lacks_it_is_asked_again_later(blobs: Blobs, tmp_path: Path) -> None:
    with peer(lambda wanted, n: FilePiece(None)) as (address, asked):
        assert is_whole(blobs, address)
        num_asked = len(asked)
        blobs._contents = Contents(tmp_path / "others")
        assert is_whole(blobs, address)
        assert len(asked) > num_asked


def test_only_so_many_contents_come_from_nodes_at_a_time(
    blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MAX_FETCHES", 0)
    with peer(lambda wanted, n: FilePiece(right(wanted))) as (address, asked), asking(blobs, KEY):
        assert is_whole(blobs, address) and not asked


def test_without_the_key_nothing_is_had(
    store: CountingStore, blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PIECE_S", 0.2)
    other, answer = FleetKey(*zmq.curve_keypair()), lambda wanted, n: FilePiece(right(wanted))
    with peer(answer) as (address, asked), asking(blobs, other):
        assert is_whole(blobs, address) and not asked
