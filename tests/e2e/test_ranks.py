"""A model that is spread over processes answers as one does; and what happens when one dies."""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Event

import httpx
import pytest
from adapter_kinds import FAMILIES, KINDS, SERVED, make_base
from engines import MakeLLM
from golden_cases import NAMES, TIGHT, Case, Expected, assert_right, interleaved, run, workload
from patience import PATIENCE_S
from quick_start import quick_start
from rank_cases import killed, ranks
from serving import serving_here, until
from test_fidelity import BLOCK, EXPERTS, PARTS, World, check
from tiny import ADAPTERS
from watched_ranks import checksums, watch_all

from weft import SamplingParams
from weft.core.errors import EngineDead
from weft.worker.gathered import Part
from weft.worker.parcels import parcels
from weft.worker.records import PartOrder

__all__ = ["workload"]

FAMILY = "olmo2"
"""Its norms of q and k run over the heads of all ranks."""
FEW = [
    *PARTS,
    "LoRA",
    "DoRA",
    "DoRA of embedding and head",
    "lora_bias",
    "modules_to_save: both",
    "modules_to_save: norms",
    "trainable_token_indices of both",
    "added tokens: trained",
    "LoKr",
    "IA3",
    "aLoRA",
]
TWO = {"tensor_parallel_size": 2}
BOTH_HALVES = {**TWO, "fully_sharded_loras": True}
CASES = [
    pytest.param((FAMILY, TWO, FEW), id=FAMILY),
    pytest.param(("qwen3-next", BOTH_HALVES, [*PARTS, *EXPERTS]), id="whole experts"),
    pytest.param(
        ("gpt-oss", {"tensor_parallel_size": 4}, [*PARTS, *EXPERTS]),
        id="whole experts with biases",
        marks=pytest.mark.exhaustive,
    ),
    *(
        pytest.param(
            (family, options, list(KINDS | EXPERTS)),
            id=f"{family}-{i}",
            marks=pytest.mark.exhaustive,
        )
        for family in SERVED
        for i, options in enumerate((TWO, BOTH_HALVES))
    ),
]
"""A family, options and kinds of adapters."""
WAYS = pytest.mark.parametrize(
    "options",
    [BOTH_HALVES, pytest.param(TWO, marks=pytest.mark.exhaustive)],
    ids=["both halves", "one half"],
)


@pytest.mark.usefixtures("quick_engines")
@WAYS
def test_the_golden_workload(
    make_llm: MakeLLM,
    workload: list[tuple[Case, Expected]],
    options: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With so little memory that images are moved, evicted, and sent to the other rank. The ranks
    have the same logits, to the bit, while adapters come and go."""
    watch_all(tmp_path, monkeypatch)
    llm = make_llm(**{**TIGHT, **options})
    part = interleaved(workload)[-2 * len(NAMES) :]
    assert_right(run(llm, part), part)
    stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.adapter_evictions > 0
    assert stats.adapter_loads > len(ADAPTERS)
    first, second = checksums(tmp_path)
    assert len(set(first)) > 32
    assert first == second


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [TWO, BOTH_HALVES], ids=["one half", "both halves"])
def test_a_killed_rank_is_told_to_a_program(options: dict[str, object]) -> None:
    killed(0, {**options, "device": "cpu"})


@pytest.mark.usefixtures("quick_engines")
def test_a_model_outlives_the_thread_that_made_it(make_llm: MakeLLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        llm = pool.submit(make_llm, **TWO).result()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert len(llm.generate([1, 2, 3], params)[0].token_ids) == 4
    start = llm._client.engine._worker._others._starting
    assert start.is_over and not start.hangs(math.inf), "it ends when the start's time is over"


@pytest.mark.usefixtures("quick_engines")
def test_images_go_past_the_orders_that_steps_wait_behind(make_llm: MakeLLM) -> None:
    """Orders to the other rank stay small when an adapter is registered and loaded, and the files
    by which it gets its part of the image are closed."""
    llm = make_llm(adapters={}, **TWO)
    others = llm._client.engine._worker._others
    sizes: list[int] = []
    write = others._ring.write

    def noted(order: bytes) -> None:
        sizes.append(len(order))
        write(order)

    others._ring.write = noted
    llm.load_adapter("upper", ADAPTERS["upper"])
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    assert len(llm.generate([1, 2, 3], params, adapter="upper")[0].token_ids) == 2
    assert sizes
    assert max(sizes) < (Path(ADAPTERS["upper"]) / "adapter_model.safetensors").stat().st_size / 4

    def open_parcels(pid: int) -> list[str]:
        found: list[str] = []
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # another thread has just closed it
                found.append(str(link.readlink()))
        return [file for file in found if "weft-parcel" in file]

    for pid in (os.getpid(), others._peers[0].process.pid):
        until(lambda pid=pid: not open_parcels(pid), "a parcel is left open")


@pytest.mark.usefixtures("quick_engines")
def test_a_rank_that_is_gone_while_it_is_asked(make_llm: MakeLLM) -> None:
    """An error that says so, and not that of a socket."""
    llm = make_llm(adapters={}, **TWO)
    others = llm._client.engine._worker._others
    process, lose, asked = others._peers[0].process, others._lose, Event()

    def lose_once_asked(message: str) -> None:
        asked.wait(PATIENCE_S)
        lose(message)

    others._lose = lose_once_asked
    process.kill()
    process.wait()
    with parcels(1) as files:
        (answer,) = others._ask(lambda call: PartOrder(call, Part("norm", "")), files)
    asked.set()
    with pytest.raises(EngineDead, match="rank 1"):
        answer.result(PATIENCE_S)


@pytest.fixture(scope="class")
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """A server over a base on several ranks, with adapters of some kinds. Ranks of the first family
    are started as users' are."""
    family, options, kinds = request.param
    folder = tmp_path_factory.mktemp("family")
    base = make_base(FAMILIES[family], folder / "base")
    memory = {"kv_cache_memory": 64 << 20, "adapter_memory": 64 << 20}
    with (
        nullcontext() if family == FAMILY else quick_start(),
        serving_here(
            folder, folder / "base", dtype="float32", block_size=BLOCK, **options, **memory
        ) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
        warnings.catch_warnings(action="ignore"),  # peft's, of what is not there in some family
    ):
        known = KINDS | EXPERTS
        yield World(client, family, folder, base, {name: known[name] for name in kinds})


class TestServer:
    """The server ends with these tests: a process can be a rank of one model only."""

    @pytest.mark.parametrize("world", CASES, indirect=True)
    def test_ranks_answer_as_peft_does(self, world: World) -> None:
        """Each kind alone, and all of them at once."""
        asks = {name: world.prompt(name, 1) for name in world.subjects}
        for name, prompt in asks.items():
            check(world, name, prompt, world.answer(name, prompt), cached=False)
        with ThreadPoolExecutor(len(asks)) as threads:
            answers = threads.map(lambda ask: world.answer(*ask), asks.items())
            for (name, prompt), got in zip(asks.items(), answers, strict=True):
                check(world, name, prompt, got, cached=True)

    @pytest.mark.parametrize("world", CASES[:1], indirect=True)
    def test_an_engine_ends_with_a_rank_and_starts_again(self, world: World) -> None:
        """A rank is killed within a request, which ends at once, with an error unless its tokens
        were there already; the next engine has the adapters."""
        prompt = world.prompt("LoRA", 2)
        body = {"prompt": prompt, "max_tokens": 100, "stream": True, "ignore_eos": True}
        asked = {**world.subjects["LoRA"].ask, **body}
        (victim,) = ranks()
        with world.client.stream("POST", "/v1/completions", json=asked) as stream:
            lines = stream.iter_lines()
            assert "error" not in next(lines)
            os.kill(victim, signal.SIGKILL)
            ends = [line for line in lines if "error" in line or '"finish_reason":"length"' in line]
        assert len(ends) == 1
        until(lambda: ranks() not in ([], [victim]), "no other rank")
        until(lambda: world.client.get("/health").status_code == 200, "no other engine")
        check(world, "LoRA", prompt, world.answer("LoRA", prompt), cached=False)
