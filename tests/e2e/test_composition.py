"""Weighted sums of adapters: against `peft`, over HTTP, beside all others, and what is refused."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
import warnings
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_thread import held, start_in_process
from engines import MakeLLM, check_idle
from http_api import CHAT, COMPLETE
from patience import in_time, until
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tables import build_table
from tiny import ADAPTERS, BASE, ask
from transformers import AutoModelForCausalLM

from weft import LLM, SamplingParams, WeightedAdapter
from weft.api import ApiSettings, create_app
from weft.checkpoint.base import array_of, tensor_of
from weft.checkpoint.compose import check_sum, sum_images, summand_of
from weft.checkpoint.pack import AdapterImage, pair_views
from weft.core.adapters import MAX_PARTS, AdapterPart, AdapterRef, check_parts, sum_of
from weft.core.config import engine_args
from weft.core.errors import (
    AdapterUnavailable,
    InvalidRequest,
    ModelNotFound,
    WeftError,
    from_wire,
)
from weft.core.messages import Submit, Tokens
from weft.core.requests import EngineRequest
from weft.core.targets import Extras, ImageLayout, layout_of
from weft.engine import adapters
from weft.engine.build import build_engine
from weft.engine.engine import Engine
from weft.fleet.client import LinkClient
from weft.fleet.supervisor import Supervisor, start_supervised
from weft.fleet.wire import COMMANDS
from weft.llm import AdapterChoice, RequestOutput
from weft.registry import AdapterRegistry, AdapterRoots, Sources
from weft.text import load_tokenizer
from weft.worker import build as worker_build
from weft.worker.memory import HostMemory

TOLERANCE = 1e-3
"""Of a log-probability."""
STEPS, TOP = 6, 20
LOGPROBS = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True, logprobs=TOP)
RESPOND = "/v1/responses"
TOKENIZER = load_tokenizer(str(BASE))
WORDS = ("planet", "hello", "wonderful", "sun")

Sum = dict[str, float]
SUMS: list[Sum] = [
    {"upper": 0.7, "reverse": 1.0},
    {"upper": -0.5, "caesar": 0.25, "repeat": 1.5},
    {"numeronym": 0.6, "alternate": 1.0},
    {"upper": 1.0, "upper-again": 1.0},
    {"piglatin": 0.3},
    {"stutter": 0.0},
    dict.fromkeys(("upper", "caesar", "repeat", "numeronym", "alternate", "reverse"), 0.3),
]
LOADED = {**ADAPTERS, "upper-again": ADAPTERS["upper"]}


def weighted(sum_: Sum) -> list[WeightedAdapter]:
    return [WeightedAdapter(name, scale) for name, scale in sum_.items()]


def body(sum_: Sum, **more: Any) -> dict[str, Any]:
    adapters = [{"name": name, "scale": scale} for name, scale in sum_.items()]
    return {"model": "base", "adapters": adapters, "temperature": 0, **more}


class Oracle:
    """peft's own sums over the example base."""

    def __init__(self) -> None:
        base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        names = sorted({name for sum_ in SUMS for name in sum_})
        with warnings.catch_warnings():
            # peft asks transformers for names that are to go one day
            warnings.simplefilter("ignore", FutureWarning)
            self.model = PeftModel.from_pretrained(base, LOADED[names[0]], names[0])
            for name in names[1:]:
                self.model.load_adapter(LOADED[name], name)
        self.model.eval()

    @torch.inference_mode()
    def logprobs(self, sum_: Sum, ids: list[int]) -> torch.Tensor:
        """(len(ids), vocabulary), after each token."""
        name = f"sum {sorted(sum_.items())}".replace(".", "_")
        if name not in self.model.peft_config:
            names, weights = list(sum_), list(sum_.values())
            self.model.add_weighted_adapter(names, weights, name, combination_type="cat")
        self.model.set_adapter(name)
        return self.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def check(self, sum_: Sum, output: RequestOutput) -> None:
        prompt = output.prompt_token_ids
        want = self.logprobs(sum_, prompt + output.token_ids[:-1])[len(prompt) - 1 :]
        assert output.logprobs is not None and len(output.logprobs) == STEPS
        for step, entry in enumerate(output.logprobs):
            assert want[step].max() - want[step, output.token_ids[step]] < TOLERANCE
            for token, logprob in entry.top:
                assert abs(want[step, token] - logprob) < TOLERANCE, (sum_, step, token)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BASE, LOADED, num_threads=1, num_blocks=512, block_size=4) as made:
        yield made
        check_idle(made)


# -- what is answered ------------------------------------------------------------------------------


def test_alone_as_peft(llm: LLM, oracle: Oracle) -> None:
    """Each sum by itself, and once more with what the prefix cache then holds."""
    for sum_ in SUMS:
        (first,) = llm.chat(ask("planet"), LOGPROBS, weighted(sum_))
        oracle.check(sum_, first)
        (again,) = llm.chat(ask("planet"), LOGPROBS, weighted(dict(reversed(sum_.items()))))
        oracle.check(sum_, again)
        assert again.num_cached_tokens > 0


def test_mixed_as_peft(llm: LLM, oracle: Oracle) -> None:
    """All sums in the same steps, with their parts and the base between them."""
    choices: list[AdapterChoice] = []
    for sum_ in SUMS:
        choices += [weighted(sum_), next(iter(sum_)), None]
    words = [WORDS[i % len(WORDS)] for i in range(len(choices))]
    outputs = llm.chat([ask(word) for word in words], LOGPROBS, choices)
    for sum_, output in zip(SUMS, outputs[::3], strict=True):
        oracle.check(sum_, output)
    for sum_, output in zip(SUMS, outputs[1::3], strict=True):
        oracle.check({next(iter(sum_)): 1.0}, output)
    assert {output.adapter for output in outputs[2::3]} == {None}


def test_scales_do_not_share_what_is_cached(llm: LLM) -> None:
    """Nor does the order matter, of which nothing depends."""
    prompt = TOKENIZER.chat(ask("metamorphosis"))
    params = SamplingParams(max_tokens=2, temperature=0.0)
    seen: dict[float, RequestOutput] = {}
    for scale in (0.5, 0.6, -0.5):
        (seen[scale],) = llm.generate(prompt, params, weighted({"sort": scale, "upper": 1.0}))
        assert seen[scale].num_cached_tokens == 0
    (again,) = llm.generate(prompt, params, weighted({"upper": 1.0, "sort": 0.5}))
    assert again.num_cached_tokens > 0 and again.adapter == seen[0.5].adapter
    assert len({output.adapter for output in seen.values()}) == 3


def test_one_alone_with_scale_1_is_itself(llm: LLM) -> None:
    prompt = TOKENIZER.chat(ask("equality"))
    params = SamplingParams(max_tokens=2, temperature=0.0)
    (plain,) = llm.generate(prompt, params, "devowel")
    (sum_,) = llm.generate(prompt, params, [WeightedAdapter("devowel")])
    assert sum_.adapter == plain.adapter and sum_.num_cached_tokens > 0


def test_first_uses_share_a_load(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0)
    choice = weighted({"vowels": 0.125, "sort": 0.5})
    outputs = llm.chat([ask(word) for word in WORDS], params, choice)
    assert outputs[0].adapter is not None
    assert llm.stats().adapters[outputs[0].adapter.digest].num_loads == 1


def test_what_choices_of_adapters_mean(llm: LLM) -> None:
    """One for all prompts, or one each; a sequence of nothing but weights is one."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    both = weighted({"upper": 1.0, "sort": 1.0})
    two = [ask("a"), ask("b")]
    names = [output.adapter and output.adapter.name for output in llm.chat(two, params, both)]
    assert names == ["sort,upper"] * 2
    outputs = llm.chat(two, params, [both, "upper"])
    assert [output.adapter and output.adapter.name for output in outputs] == ["sort,upper", "upper"]
    outputs = llm.chat(two, params, [both[:1], [both[1], both[0]]])
    assert [output.adapter and output.adapter.name for output in outputs] == ["upper", "sort,upper"]
    bad: list[Any] = [[both[0], None], [[], "upper"], [7, None], [both], [], both[0], 7]
    for choice in bad:
        with pytest.raises(InvalidRequest) as error:
            llm.chat(two, params, choice)
        assert error.value.param in ("adapter", "adapters")


# -- over HTTP -------------------------------------------------------------------------------------


class Server:
    """The application over an engine in a thread, and a client of it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self.folder = folder
        self.engines: list[Engine] = []
        self.clients: list[LinkClient] = []
        self.registry = AdapterRegistry(["base", "alias"], str(BASE))
        options = {"num_threads": 1, "num_blocks": 512, **options}
        self.args = engine_args(str(BASE), **options)
        self.engine: Supervisor = self.run(self._start())

    async def _start(self) -> Supervisor:
        async def start(args: Any) -> LinkClient:
            with pytest.MonkeyPatch.context() as patch:
                init = Engine.__init__

                def record(engine: Engine, *args: Any, **options: Any) -> None:
                    init(engine, *args, **options)
                    self.engines.append(engine)

                patch.setattr(Engine, "__init__", record)
                client = await start_in_process(args)
            self.clients.append(client)
            return client

        engine = await start_supervised(self.args, start)
        settings = ApiSettings(served_model_names=["base", "alias"])
        sources = Sources(AdapterRoots([self.folder, *ADAPTERS.values()]))
        self.app = create_app(engine, self.registry, TOKENIZER, sources, settings)
        transport = httpx.ASGITransport(app=self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://weft")
        return engine

    def run(self, work: Awaitable[Any]) -> Any:
        return self._runner.run(in_time(work))

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.run(self.http.post(path, json=body))

    def load(self, name: str, path: Path) -> None:
        body = {"lora_name": name, "lora_path": str(path)}
        answer = self.post("/v1/load_lora_adapter", body)
        assert answer.status_code == 200, answer.text

    @property
    def known(self) -> int:
        """Adapters and sums of which the engine knows."""
        return len(self.engines[-1]._residency.catalog.known)

    def close(self) -> None:
        async def end() -> None:
            for card in self.registry.adapter_cards():
                drained: list[AdapterRef] = []
                self.registry.retire(card.ref.name, drained.append)
                assert drained, f"a lease of {card.ref.name} is left"
                await self.engine.release(card.ref.digest, card.ref.name)
            stats = await self.engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
            await self.http.aclose()
            await self.engine.close()

        self.registry.check()
        self.run(end())
        self._runner.close()
        last = self.engines[-1]
        last.check()
        assert not last._residency.catalog.known, "sums outlive their parts"


@contextmanager
def running(folder: Path, names: list[str], **options: Any) -> Iterator[Server]:
    server = Server(folder, **options)
    try:
        for name in names:
            server.load(name, ADAPTERS[name])
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    names = ["upper", "reverse", "caesar", "repeat", "sort", "alternate"]
    folder = tmp_path_factory.mktemp("root")
    with running(folder, names, max_lora_rank=24) as made:
        make_dora(folder / "dora")
        made.load("dora", folder / "dora")
        yield made


def make_dora(folder: Path) -> None:
    """As "upper", with other lengths of its columns."""
    shutil.copytree(ADAPTERS["upper"], folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, tensor in list(tensors.items()):
        if name.endswith("lora_B.weight"):
            vector = name.replace("lora_B.weight", "lora_magnitude_vector")
            tensors[vector] = torch.full((tensor.shape[0],), 0.9)
    save_file(tensors, folder / "adapter_model.safetensors")


SUM = SUMS[0]


def test_over_http_as_peft(server: Server, oracle: Oracle) -> None:
    """The first step's log-probabilities over chat, and the same text over all routes."""
    asked = body(SUM, messages=ask("planet"), max_tokens=STEPS, logprobs=True, top_logprobs=TOP)
    answer = server.post(CHAT, asked).json()
    assert answer["model"] == "base" and answer["system_fingerprint"].startswith("fp_")
    prompt = TOKENIZER.chat(ask("planet"))
    want = oracle.logprobs(SUM, prompt)[-1]
    first = answer["choices"][0]["logprobs"]["content"][0]
    tops = sorted((entry["logprob"] for entry in first["top_logprobs"]), reverse=True)
    assert tops == pytest.approx(want.topk(TOP).values.tolist(), abs=TOLERANCE)
    text = answer["choices"][0]["message"]["content"]
    assert text and text != "planet"
    asked = body(SUM, prompt=prompt, max_tokens=STEPS)
    assert server.post(COMPLETE, asked).json()["choices"][0]["text"] == text
    asked = body(SUM, input="planet", max_output_tokens=STEPS)
    answer = server.post(RESPOND, asked).json()
    assert answer["output"][0]["content"][0]["text"] == text and answer["model"] == "base"
    streamed = server.post(CHAT, body(SUM, messages=ask("planet"), max_tokens=STEPS, stream=True))
    events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    pieces = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == text


def test_null_means_not_given(server: Server) -> None:
    asked = {"model": "upper", "messages": ask("planet"), "temperature": 0, "adapters": None}
    assert server.post(CHAT, asked).json()["choices"][0]["message"]["content"] == "PLANET"


U = {"name": "upper"}
REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"adapters": []}, 400, "adapters", "must not be empty"),
    ({"adapters": [{"name": f"{i}"} for i in range(9)]}, 400, "adapters", "at most 8"),
    ({"adapters": [U, {"name": "upper", "scale": 2}]}, 400, "adapters", "'upper' twice"),
    ({"adapters": [{"name": "upper", "scale": 1e3}]}, 400, "adapters[0].scale", "100"),
    ({"adapters": [U, {"name": "sort", "scale": "1"}]}, 400, "adapters[1].scale", "number"),
    ({"adapters": [{"name": "sort", "scale": True}]}, 400, "adapters[0].scale", "number"),
    ({"adapters": [{"scale": 1}]}, 400, "adapters[0].name", "required"),
    ({"adapters": [{**U, "weight": 1}]}, 400, "adapters[0].weight", "not a known field"),
    ({"adapters": {"upper": 1}}, 400, "adapters", "must be a list"),
    ({"adapters": [U, {"name": "nope"}]}, 404, "adapters", "'nope' does not exist"),
    ({"adapters": [U, {"name": "base"}]}, 404, "adapters", "'base' does not exist"),
    ({"adapters": [U], "model": "sort"}, 400, "adapters", "'sort'"),
    ({"adapters": [U], "model": "base:sort"}, 400, "adapters", "'base:sort'"),
    ({"adapters": [U], "model": "nope"}, 404, "model", "'nope' does not exist"),
    ({"adapters": [{"name": "alternate"}, U]}, 400, "adapters", "up to 32 in model.layers.0"),
    ({"adapters": [U, {"name": "dora"}]}, 400, "adapters", "'dora' can't be part of a sum"),
    ({"adapters": [{"name": "dora", "scale": 0.5}]}, 400, "adapters", "DoRA"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETE, RESPOND])
def test_refused_by_name(server: Server, path: str) -> None:
    """At once, also when an answer in pieces is asked for; nothing is left of it."""
    say = {CHAT: {"messages": ask("a")}, COMPLETE: {"prompt": "a"}, RESPOND: {"input": "a"}}[path]
    known = server.known
    for fields, status, param, words in REFUSED:
        for stream in (False, True):
            answer = server.post(path, {"model": "base", **say, "stream": stream, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), (fields, error)
            assert words in error["message"], error
    text = '{"model": "base", "prompt": "a", "adapters": [{"name": "upper", "scale": NaN}]}'
    answer = server.run(server.http.post(path, content=text))
    assert answer.status_code == 400
    assert server.known == known


def test_dora_alone_is_itself(server: Server) -> None:
    asked = body({"dora": 1.0}, messages=ask("planet"), max_tokens=4)
    plain = {"model": "dora", "messages": ask("planet"), "max_tokens": 4, "temperature": 0}
    same = [server.post(CHAT, each).json() for each in (asked, plain)]
    assert same[0]["choices"] == same[1]["choices"]
    assert same[0]["system_fingerprint"] == same[1]["system_fingerprint"]


def test_the_field_is_documented(server: Server) -> None:
    paths = server.run(server.http.get("/openapi.json")).json()["paths"]
    for path in (CHAT, COMPLETE, RESPOND):
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        field = content["schema"]["properties"]["adapters"]["anyOf"][0]
        assert field["maxItems"] == MAX_PARTS and "sum" in field["description"]
        assert field["items"]["properties"].keys() == {"name", "scale"}


def test_counted_under_the_joined_name(server: Server) -> None:
    before = server.run(server.http.get("/metrics")).text
    assert server.post(CHAT, body({"sort": 1, "caesar": 1}, messages=ask("a"))).status_code == 200
    text = server.run(server.http.get("/metrics")).text
    assert 'adapter="caesar,sort"' in text and 'adapter="caesar,sort"' not in before


def test_unloading_a_part_waits_for_the_sum(tmp_path: Path) -> None:
    """What streams ends as it began; then the sum goes with its part."""
    with running(tmp_path, ["upper", "reverse"]) as server:
        asked = body(SUM, messages=ask("planet"), max_tokens=80, ignore_eos=True)
        whole = server.post(CHAT, asked).json()["choices"][0]["message"]["content"]
        assert server.known == 3

        is_over = threading.Event()

        async def scenario() -> None:
            stream = asyncio.create_task(server.http.post(CHAT, json={**asked, "stream": True}))
            engine = server.engines[-1]
            await until(lambda: engine.scheduler.num_running > 0)
            name = {"lora_name": "upper"}
            unload = asyncio.create_task(server.http.post("/v1/unload_lora_adapter", json=name))
            await until(lambda: server.registry.info("upper") is None)
            refused = await server.http.post(CHAT, json=asked)
            assert refused.status_code == 404 and not unload.done() and not stream.done()
            assert server.known == 3
            is_over.set()
            streamed = await stream
            events = [line[6:] for line in streamed.text.splitlines() if line[6:7] == "{"]
            deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
            assert "".join(delta.get("content", "") for delta in deltas) == whole
            assert (await unload).status_code == 200

        with held(lambda engine: engine.scheduler.num_running > 0 and not is_over.is_set()):
            server.run(scenario())
        assert server.known == 1, "the other part"


def test_after_a_restart(tmp_path: Path) -> None:
    """Sums are made again when they are asked for; one whose part is lost says so."""
    shutil.copytree(ADAPTERS["caesar"], tmp_path / "lost")
    with running(tmp_path, ["upper", "reverse"], adapter_cache_dir="none") as server:
        server.load("lost", tmp_path / "lost")
        good = body(SUM, messages=ask("planet"))
        before = server.post(CHAT, good).json()["choices"]
        shutil.rmtree(tmp_path / "lost")

        async def restart() -> None:
            await server.clients[-1].close()
            await until(lambda: server.engine.restarts == 1)

        server.run(restart())
        assert server.post(CHAT, good).json()["choices"] == before
        answer = server.post(CHAT, body({"upper": 1, "lost": 1}, messages=ask("planet")))
        assert answer.status_code == 503 and "loaded again" in answer.json()["error"]["message"]


# -- where parts come from, and what is kept -------------------------------------------------------


def answers(llm: LLM, sum_: Sum, word: str = "planet") -> list[int]:
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    (output,) = llm.chat(ask(word), params, weighted(sum_))
    llm._client.engine._residency.check()
    return output.token_ids


@pytest.mark.parametrize("cache", ["none", "images"])
def test_parts_that_are_not_on_the_host(
    make_llm: MakeLLM, tmp_path: Path, cache: str, oracle: Oracle
) -> None:
    """They come from their folders, or, also when these are gone, from their image files."""
    sums = SUMS[:2]
    folders = {name: tmp_path / name for sum_ in sums for name in sum_}
    for name, folder in folders.items():
        shutil.copytree(ADAPTERS[name], folder)
    place = "none" if cache == "none" else str(tmp_path / "cache")
    llm = make_llm(adapters=folders, adapter_host_memory=1, adapter_cache_dir=place)
    (output,) = llm.chat(ask("planet"), LOGPROBS, weighted(sums[0]))
    oracle.check(sums[0], output)
    for name in sums[1]:
        shutil.rmtree(folders[name])
    if cache == "images":
        (output,) = llm.chat(ask("planet"), LOGPROBS, weighted(sums[1]))
        oracle.check(sums[1], output)
        assert len(list((tmp_path / "cache").iterdir())) == len(folders), "sums are not kept there"
    else:
        with pytest.raises(AdapterUnavailable, match="not a folder"):
            answers(llm, sums[1])


def test_those_used_least_recently_are_forgotten(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "MAX_SUMS", 2)
    llm = make_llm(adapters={name: ADAPTERS[name] for name in ("upper", "sort")})
    known = llm._client.engine._residency.catalog.known
    sums = [{"upper": scale, "sort": 1.0} for scale in (0.1, 0.2, 0.3)]
    first = [answers(llm, sum_) for sum_ in sums]
    assert len(known) == 4 and len(llm.stats().resident_adapters) == 2
    assert [answers(llm, sum_) for sum_ in reversed(sums)] == first[::-1]
    many = [[WeightedAdapter("upper", 0.01 * i), WeightedAdapter("sort")] for i in range(8)]
    many.append(many[0])  # to be forgotten by then, but taken back
    llm.chat([ask("a") for _ in many], SamplingParams(max_tokens=3), many)
    check_idle(llm)
    assert len(known) == 4, "those in use are forgotten when their requests end"
    llm.unload_adapter("upper")
    assert len(known) == 1


def test_unused_sums_do_not_hinder_pins(make_llm: MakeLLM) -> None:
    """Memory for four adapters: with a sum of three known, none could be pinned."""
    shown = make_llm(adapters={"upper": ADAPTERS["upper"]}).stats()
    size = shown.tiers["host"].num_bytes
    llm = make_llm(adapters={}, adapter_memory=4 * size)
    for name in ("a", "b"):
        tensors = load_file(ADAPTERS["upper"] / "adapter_model.safetensors")
        config = json.loads((ADAPTERS["upper"] / "adapter_config.json").read_text())
        llm.publish_adapter(name, {**config, "lora_alpha": len(name) + ord(name)}, tensors)
    llm.load_adapter("c", ADAPTERS["upper"])
    big = {"a": 0.01, "b": -0.01, "c": 1.0}
    want = answers(llm, big)
    llm.load_adapter("kept", ADAPTERS["upper"], pinned=True)
    assert answers(llm, big) == want
    llm.load_adapter("more", ADAPTERS["reverse"], pinned=True)
    with pytest.raises(InvalidRequest, match="pinned adapters leave") as error:
        answers(llm, big)
    assert error.value.param == "adapters"


def test_weights_beyond_the_dtype(make_llm: MakeLLM) -> None:
    """Known only when the sum is made: its requests end, and nothing else."""
    llm = make_llm(adapters={}, dtype="float16")
    path = ADAPTERS["upper"]
    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    large = {n: t * (3e4 / t.abs().max() / 2 if "lora_B" in n else 1) for n, t in tensors.items()}
    llm.publish_adapter("large", config, large)
    llm.publish_adapter("upper", config, tensors)
    with pytest.raises(InvalidRequest, match=r"exceed torch\.float16") as error:
        answers(llm, {"large": 4.0, "upper": 1.0})
    assert error.value.param == "adapters"
    assert answers(llm, {"large": 0.001, "upper": 1.0})


# -- the parts in the pieces -----------------------------------------------------------------------


def random_image(
    generator: random.Random, digest: str, dtype: torch.dtype = torch.float32
) -> AdapterImage:
    ranks = tuple(generator.choice((0, 1, 2, 5)) for _ in TABLE.targets)
    rank = (1, *ranks[1:])
    shifted = frozenset(i for i in range(len(rank)) if generator.random() < 0.4)
    layout = layout_of(TABLE, rank, Extras(shifted=shifted) if shifted else None, dtype.itemsize)
    torch.manual_seed(generator.randrange(1 << 30))
    data = torch.zeros(layout.num_elements, dtype=dtype)
    for target in TABLE.targets:
        for expert in range(TABLE.copies(target.kind)) if rank[target.slice] else ():
            for view in pair_views(array_of(data), target, TABLE, layout, expert):
                tensor_of(view).copy_(torch.randn(view.shape))
        if target.slice in shifted:
            shift_of(data, layout, target.slice).normal_()
    return AdapterImage(digest, layout, data, (digest,))


def shift_of(data: torch.Tensor, layout: ImageLayout, index: int) -> torch.Tensor:
    size = TABLE.targets[index].out_features
    if not layout.shift_offset or layout.shift_offset[index] < 0:
        return torch.zeros(size)
    start = layout.shift_offset[index]
    return data[start : start + size * 4 // data.element_size()].view(torch.float32)


TABLE = build_table(
    [
        ("embedding", 11, [("embed_tokens", 6)]),
        ("linear", 6, [("l.q", 8), ("l.k", 3), ("l.v", 5)]),
        ("experts", 6, [("l.gate", 7), ("l.up", 7)]),
        ("experts", 7, [("l.down", 6)]),
        ("head", 6, [("lm_head", 11)]),
    ],
    num_experts=3,
)


def delta(image: AdapterImage, index: int, expert: int) -> torch.Tensor:
    target = TABLE.targets[index]
    if not image.layout.rank[index]:
        return torch.zeros(target.out_features, target.in_features)
    a, b = pair_views(array_of(image.data), target, TABLE, image.layout, expert)
    return tensor_of(b).float() @ tensor_of(a).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_images(dtype: torch.dtype) -> None:
    """Of every kind of target, experts too, and of vectors that are added to outputs."""
    generator = random.Random(5)
    for count in (1, 2, 3, 8):
        images = [random_image(generator, f"{i}", dtype) for i in range(count)]
        parts = [(image, generator.choice((-1.0, 0.0, 0.5, 1.0, 2.0))) for image in images]
        size = check_sum([(i.digest, summand_of(i)) for i in images], TABLE, 256, dtype)
        into = torch.full((size * dtype.itemsize + 9,), 255, dtype=torch.uint8)
        for room in (None, into):
            made = sum_images("sum", parts, TABLE, dtype, room)
            assert made.layout.num_elements == size == made.data.numel()
            assert made.targets == tuple(image.digest for image in images)
            for target in TABLE.targets:
                for expert in range(TABLE.copies(target.kind)):
                    want = sum(scale * delta(i, target.slice, expert) for i, scale in parts)
                    torch.testing.assert_close(delta(made, target.slice, expert), want)
                want = sum(s * shift_of(i.data, i.layout, target.slice) for i, s in parts)
                shift = shift_of(made.data, made.layout, target.slice)
                torch.testing.assert_close(shift, want)


def test_what_can_not_be_summed() -> None:
    """Whatever is not known to be summed exactly is refused."""
    extras = {
        "DoRA": Extras(scaled=frozenset({1})),
        "rows of the embedding": Extras(embedding_rows=2),
        "rows of the head": Extras(head_rows=2),
    }
    for words, extra in extras.items():
        layout = layout_of(TABLE, (1,) * len(TABLE.targets), extra)
        image = AdapterImage("x", layout, torch.zeros(layout.num_elements), ())
        with pytest.raises(InvalidRequest, match=words):
            check_sum([("x", summand_of(image))], TABLE, 256, torch.float32)
    layout = ImageLayout((1,), (0,), (0,), 64, norm_offset=(0,), vocab_size=9)
    image = AdapterImage("x", layout, torch.zeros(64), (), invocation=(1,))
    for words in ("norms", "a vocabulary", "aLoRA"):
        assert words in summand_of(image).beyond


def test_what_names_a_sum() -> None:
    """Its parts and their scales, not their order."""
    a, b = AdapterRef("a", 1, "d1"), AdapterRef("b", 3, "d0")
    parts = [AdapterPart(a, 0.5), AdapterPart(b, 2)]
    ref, ordered = sum_of(parts)
    assert (ref.name, ref.version, ordered) == ("a,b", 0, tuple(reversed(parts)))
    assert sum_of(parts[::-1])[0] == ref == sum_of([parts[0], AdapterPart(b, 2.0)])[0]
    others = [
        [AdapterPart(a, 2), AdapterPart(b, 0.5)],
        [AdapterPart(a, 0.5), AdapterPart(b, 2.0000001)],
        parts[:1],
        [*parts, AdapterPart(a, 0)],
    ]
    assert len({sum_of(each)[0].digest for each in (parts, *others)}) == 5


def test_bad_weights() -> None:
    for scale in (float("nan"), float("inf"), -101, "1", None, True):
        with pytest.raises(InvalidRequest) as error:
            WeightedAdapter("a", scale)  # type: ignore[arg-type]
        assert error.value.param == "adapters"
    for names in ("", "aba", "abcdefghi"):
        with pytest.raises(InvalidRequest):
            check_parts([WeightedAdapter(name) for name in names])


def test_the_registry_leases_all_or_none(server: Server) -> None:
    registry = server.registry
    with pytest.raises(ModelNotFound):
        registry.resolve_sum([WeightedAdapter("upper"), WeightedAdapter("nope")])
    with registry.resolve_sum([WeightedAdapter("upper"), WeightedAdapter("sort", 2)]) as lease:
        assert {part.ref.name for part in lease.parts} == {"upper", "sort"}
        leases = [v.leases for v in registry._live.values()]
        assert sum(leases) == 2 and registry._live["upper"].leases == 1
    assert not any(v.leases for v in registry._live.values())


def test_on_the_wire() -> None:
    ref, parts = sum_of([AdapterPart(AdapterRef("a", 1, "d1"), 0.5)])
    submit = Submit(EngineRequest("r", [1], SamplingParams(), ref, parts=parts, seed=0))
    assert COMMANDS.decode(COMMANDS.encode(submit)) == submit


@pytest.mark.parametrize("arena", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_nothing_leaks_at_random(monkeypatch: pytest.MonkeyPatch, arena: bool) -> None:
    """Requests for sums come, end and are left while adapters come and go, with room for few, also
    with the host memory in one piece that a GPU's engine has."""
    monkeypatch.setattr(adapters, "MAX_SUMS", 3)
    if arena:
        memory = HostMemory(800_000, torch.full((800_000,), 255, dtype=torch.uint8))
        monkeypatch.setattr(worker_build, "host_memory", lambda *_: memory)
    args = engine_args(
        str(BASE),
        num_threads=1,
        num_blocks=64,
        max_loras=2,
        adapter_memory=1_200_000,
        adapter_host_memory=400_000,
        adapter_cache_dir="none",
        max_adapter_wait=0.01,
    )
    engine = build_engine(args)
    rng = random.Random(3)
    refs: dict[str, AdapterRef] = {}
    open_ids: dict[str, list[str]] = {}
    """With the names of their adapters."""
    ended: list[WeftError | None] = []

    def settle(events: Any) -> None:
        for event in events:
            if event.finish_reason is not None:
                open_ids.pop(event.request_id, None)
                ended.append(from_wire(event.error) if event.error else None)

    def publish(name: str) -> None:
        config = json.loads((ADAPTERS[name] / "adapter_config.json").read_text())
        tensors = load_file(ADAPTERS[name] / "adapter_model.safetensors")
        refs[name] = AdapterRef(name, 1, engine.hold_tensors(config, tensors, name).digest)

    for number in range(110):
        names = ["upper", "caesar", "reverse", "stutter"]
        what = rng.random()
        if what < 0.08 and len(refs) > 2:
            name = rng.choice(list(refs))
            if rng.random() < 0.2 or not any(name in names for names in open_ids.values()):
                engine.release(refs.pop(name).digest, name)
        elif len(refs) < len(names) and what < 0.2:
            publish(rng.choice([name for name in names if name not in refs]))
        elif what < 0.6 and refs:
            chosen = rng.sample(list(refs), rng.randint(1, min(3, len(refs))))
            parts = [AdapterPart(refs[name], rng.choice((0.5, 2.0))) for name in chosen]
            ref, ordered = sum_of(parts)
            params = SamplingParams(max_tokens=rng.randint(1, 4))
            prompt = TOKENIZER.chat(ask(rng.choice(WORDS)))
            request = EngineRequest(f"{number}", prompt, params, ref, parts=ordered, seed=0)
            open_ids[request.request_id] = chosen
            settle([event] if (event := engine.submit(request)) else [])
        elif what < 0.65 and open_ids:
            settle([event] if (event := engine.abort(rng.choice(sorted(open_ids)))) else [])
        else:
            for report in engine.step():
                settle(report if isinstance(report, Tokens) else ())
        engine.check()
    while open_ids:
        for report in engine.step():
            settle(report if isinstance(report, Tokens) else ())
    for ref in refs.values():
        engine.release(ref.digest, ref.name)
    while engine.step() or engine.working or engine._residency._loading:
        pass
    engine._residency.check()
    assert not engine._residency.catalog.known and not engine._residency.slots.used_elements
    assert not engine._residency.host._readers
    engine.close()
    errors = [error for error in ended if error is not None]
    assert len(ended) > 30 and len(errors) < len(ended) / 2
    assert all(isinstance(error, AdapterUnavailable) for error in errors), errors
