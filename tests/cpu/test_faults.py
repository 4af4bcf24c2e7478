"""Adapters whose files break while they are served, beside good traffic."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine_thread import start_in_process
from tiny import ADAPTERS, BASE, answer, ask

from weft.core.adapters import AdapterInfo, AdapterRef, AdapterSource
from weft.core.config import engine_args
from weft.core.errors import AdapterError, AdapterUnavailable, from_wire
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.sampling import SamplingParams
from weft.fleet.client import LinkClient
from weft.text import load_tokenizer

ARGS = engine_args(
    str(BASE), num_threads=1, num_blocks=512, adapter_host_memory=1, adapter_cache_dir="none"
)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
TOKENIZER = load_tokenizer(str(BASE))
NUM_BROKEN = 50
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


def truncated(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def corrupt(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-100:] = b"\xff" * 100
    (folder / WEIGHTS).write_bytes(content)


def too_large(folder: Path) -> None:
    with (folder / CONFIG).open("ab") as file:
        file.write(b" " * (1 << 20))


def other(folder: Path) -> None:
    shutil.copytree(ADAPTERS["upper"], folder, dirs_exist_ok=True)


def no_file(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).mkdir()


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (gone, "not a folder"),
    (truncated, "changed on disk"),
    (corrupt, "changed on disk"),
    (too_large, "larger than any"),
    (other, "changed on disk"),
    (no_file, "no regular file"),
]


def distinct_copies(root: Path) -> list[Path]:
    """Of one adapter, with as many digests."""
    folders = []
    for i in range(NUM_BROKEN):
        folder = Path(shutil.copytree(ADAPTERS["caesar"], root / str(i)))
        with (folder / CONFIG).open("a") as file:
            file.write(" " * (i + 1))
        folders.append(folder)
    return folders


async def register(client: LinkClient, folder: Path) -> AdapterRef:
    return ref_of(folder, await client.hold(AdapterSource(str(folder)), folder.name))


def ref_of(folder: Path, info: AdapterInfo) -> AdapterRef:
    return AdapterRef(folder.name, 1, info.digest)


async def ends(client: LinkClient, number: int, ref: AdapterRef | None) -> tuple[str, TokenEvent]:
    """The answer, and the last event."""
    request = EngineRequest(str(number), TOKENIZER.chat(ask("hello")), GREEDY, ref, seed=0)
    events = [event async for event in client.generate(request)]
    tokens = [token for event in events for token in event.token_ids]
    return TOKENIZER.decode(tokens, skip_special_tokens=True), events[-1]


async def test_broken_adapters_beside_good_traffic(tmp_path: Path) -> None:
    """Each request of a broken one ends with the reason; registrations that fail do no harm.

    Registering the broken folders again fails, but for those that hold another adapter now.
    """
    folders = distinct_copies(tmp_path)
    client = await start_in_process(ARGS)
    broken = [await register(client, folder) for folder in folders]
    good = [await register(client, ADAPTERS[n]) for n in ("upper", "reverse", "sort")]
    for i, folder in enumerate(folders):
        FAULTS[i % len(FAULTS)][0](folder)
    served = [*good, None]
    many = [served[i % len(served)] for i in range(NUM_BROKEN)]
    mixed = [ref for pair in zip(broken, many, strict=True) for ref in pair]
    unfit = [client.hold(AdapterSource(str(folder)), "unfit") for folder in folders[: len(FAULTS)]]
    results, refusals = await asyncio.gather(
        asyncio.gather(*(ends(client, i, ref) for i, ref in enumerate(mixed))),
        asyncio.gather(*unfit, return_exceptions=True),
    )
    refused = [isinstance(refusal, AdapterError) for refusal in refusals]
    assert refused == [fault is not other for fault, _ in FAULTS]
    for i, (text, last) in enumerate(results[::2]):
        assert text == "" and last.finish_reason == "error" and last.error is not None
        error = from_wire(last.error)
        assert type(error) is AdapterUnavailable
        assert FAULTS[i % len(FAULTS)][1] in error.message
    for ref, (text, last) in zip(many, results[1::2], strict=True):
        assert text == answer(ref.name if ref else None, "hello")
        assert last.finish_reason == "stop"
    stats = await client.stats()
    assert stats.finished == {"stop": NUM_BROKEN, "error": NUM_BROKEN}
    assert stats.adapter_loads == len(good), "what is broken took nothing from the others"
    assert stats.adapters.keys() == {ref.digest for ref in good}
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    for ref in (*broken, *good):
        await client.release(ref.digest, ref.name)
    await client.release(good[0].digest, "unfit")
    await ends(client, 0, None)
    stats = await client.stats()
    assert (stats.host_adapters, stats.adapter_bytes, stats.adapters) == ((), 0, {})
    await client.close()


async def test_what_was_registered_is_served_from_its_image(tmp_path: Path) -> None:
    """Folders break, and images do; who has neither gets the reason, all others their answers."""
    folders = {
        name: Path(shutil.copytree(ADAPTERS[name], tmp_path / name))
        for name in ("caesar", "upper", "reverse")
    }
    cache = tmp_path / "cache"
    args = replace(ARGS, lora=replace(ARGS.lora, adapter_cache_dir=str(cache)))
    client = await start_in_process(args)
    infos = {n: await client.hold(AdapterSource(str(f)), n) for n, f in folders.items()}
    refs = {name: ref_of(folders[name], info) for name, info in infos.items()}
    while len(list(cache.glob("*.image"))) < len(refs):
        await asyncio.sleep(0.01)
    image_of = {n: next(cache.glob(f"{ref.digest}*")) for n, ref in refs.items()}
    gone(folders["caesar"])
    corrupt(folders["upper"])
    for name in ("upper", "reverse"):
        os.truncate(image_of[name], 5000)
    ended = await asyncio.gather(*(ends(client, n, refs[n]) for n in folders))
    (caesar, _), (_, upper), (reverse, _) = ended
    assert caesar == answer("caesar", "hello") and reverse == answer("reverse", "hello")
    assert upper.error is not None and "changed on disk" in from_wire(upper.error).message
    await client.release(refs["caesar"].digest, "caesar")
    source = AdapterSource(str(folders["caesar"]), refs["caesar"].digest)
    again = await client.hold(source, "caesar")
    assert again == infos["caesar"], "as when the engine is started again"
    stats = await client.stats()
    assert stats.tiers["disk"].errors == 2 and stats.tiers["disk"].hits == 2
    await client.close()
