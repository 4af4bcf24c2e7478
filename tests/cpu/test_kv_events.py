"""What an engine publishes of its prefixes: the messages, as subscribers get and read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engines import MakeLLM
from patience import PATIENCE_S
from tiny import ADAPTERS

from weft import SamplingParams
from weft.cli.args import parse_kv_events
from weft.core.config import KvEventsArgs
from weft.core.errors import ConfigError
from weft.fleet.kv_events import END, KvEventPublisher

SIZE = 16
PROMPT = [3 + i % 40 for i in range(2 * SIZE + 5)]


@pytest.fixture
def endpoints(tmp_path: Path) -> KvEventsArgs:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("events", "replays")]
    return KvEventsArgs(*addresses, buffer_steps=4, topic="kv@node@tiny")


@pytest.fixture
def subscriber(endpoints: KvEventsArgs) -> Iterator[Any]:
    """One that is there before anything is published."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.rcvtimeo = int(PATIENCE_S * 1000)
        socket.subscribe(b"kv@")
        socket.connect(endpoints.endpoint)
        yield socket


def test_a_subscriber_follows_the_prefix_index(
    make_llm: MakeLLM, endpoints: KvEventsArgs, subscriber: Any
) -> None:
    llm = make_llm(adapters={"reverse": ADAPTERS["reverse"]}, num_blocks=8)
    engine = llm._client.engine
    engine.record_cache()
    publisher = KvEventPublisher(endpoints, SIZE)
    try:
        numbers: list[int] = []

        while not subscriber.poll(20):
            publisher.publish([])
        num_before = publisher._number

        def events_of(prompt: list[int], adapter: str | None = None) -> list[dict[str, Any]]:
            llm.generate(prompt, SamplingParams(max_tokens=1), adapter)
            publisher.publish(engine.take_cache_events())
            number = -1
            while number < num_before:
                topic, told, payload = subscriber.recv_multipart()
                number = int.from_bytes(told, "big")
            numbers.append(number)
            _, events, rank = msgspec.msgpack.decode(payload)
            assert (topic, rank) == (b"kv@node@tiny", 0)
            return events

        [stored] = events_of(PROMPT)
        hashes = stored.pop("block_hashes")
        assert len(set(hashes)) == 2
        assert all(0 < each < 1 << 64 for each in hashes)
        assert stored == {
            "type": "BlockStored",
            "parent_block_hash": None,
            "token_ids": PROMPT[: 2 * SIZE],
            "block_size": SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        # The same text goes on from the block that is known; an adapter's never is the base's.
        [more] = events_of([*PROMPT[: 2 * SIZE], *range(3, 3 + SIZE), 5])
        assert (more["parent_block_hash"], more["token_ids"]) == (hashes[1], [*range(3, 3 + SIZE)])
        [own] = events_of(PROMPT, "reverse")
        assert (own["lora_name"], own["parent_block_hash"]) == ("reverse", None)
        assert own["token_ids"] == PROMPT[: 2 * SIZE]
        assert not set(own["block_hashes"]) & set(hashes)
        # What makes room for others is told too, each once.
        known = {*hashes, *more["block_hashes"], *own["block_hashes"]}
        events = events_of([7] * (6 * SIZE))
        removed = [e["block_hashes"] for e in events if e["type"] == "BlockRemoved"]
        gone = [each for part in removed for each in part]
        assert gone and len(set(gone)) == len(gone) and set(gone) <= known
        assert numbers == [num_before + n for n in range(4)]
    finally:
        publisher.close()


def test_missed_messages_are_sent_again(endpoints: KvEventsArgs) -> None:
    publisher = KvEventPublisher(endpoints, SIZE)
    try:
        for _ in range(6):
            publisher.publish([])
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.rcvtimeo = int(PATIENCE_S * 1000)
            socket.connect(endpoints.replay_endpoint)
            for asked, expected in ((3, [3, 4, 5]), (0, [2, 3, 4, 5]), (9, [])):
                socket.send_multipart([b"", asked.to_bytes(8, "big")])
                replies = iter(lambda: socket.recv_multipart()[1], END)
                assert [int.from_bytes(number, "big") for number in replies] == expected
    finally:
        publisher.close()


def test_the_flag_is_as_vllms() -> None:
    given = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:7", "hwm": 5}'
    )
    assert parse_kv_events(given) == KvEventsArgs("tcp://*:7", hwm=5)
    assert parse_kv_events('{"enable_kv_cache_events": false}') is None
    assert parse_kv_events('{"publisher": "null"}') is None
    for wrong in ("[]", "no", '{"a": 1}', '{"hwm": 0}', '{"hwm": "x"}', '{"publisher": "x"}'):
        with pytest.raises(ConfigError, match=r"--kv-events-config|--hwm"):
            parse_kv_events(wrong)
    with pytest.raises(ConfigError, match="tcp://no-such"):
        KvEventPublisher(KvEventsArgs("tcp://no-such-interface:*"), SIZE)
