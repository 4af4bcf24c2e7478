"""What tenants leave each other of a server: places, and what they can tell of each other."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from engine_thread import held, start_in_process
from http_api import CHAT, COMPLETE, HI, MakeWorld, Web, run
from patience import until
from tiny import BASE

from weft.api import ApiSettings, create_app
from weft.api.admission import Admission
from weft.core.config import engine_args
from weft.core.errors import InvalidRequest, Overloaded
from weft.core.messages import Report, Tokens
from weft.core.tenants import Caps, Tenant
from weft.engine.engine import Engine
from weft.fleet.client import LinkClient
from weft.registry import AdapterRegistry, AdapterRoots, Sources
from weft.serving.quotas import Quotas

KEYS = ["flood=f", "victim=v", "nobody"]


async def ask(web: Web, key: str, path: str = COMPLETE, **body: Any) -> httpx.Response:
    head = {"authorization": f"Bearer {key}"}
    whole = {"model": "base", **({"messages": HI} if path == CHAT else {"prompt": "abc"}), **body}
    return await web.http.post(path, json=whole, headers=head)


def test_a_flood_makes_nobody_else_wait_for_a_place(make_world: MakeWorld) -> None:
    """One tenant's requests with many choices fill the server; others still get in, and the first
    is told to come again until the others have their shares."""
    world = make_world(max_open=24, api_keys=KEYS)

    async def scenario(web: Web) -> None:
        world.engine.gate = asyncio.Event()
        flood = [asyncio.create_task(ask(web, "f", n=8)) for _ in range(6)]
        await until(lambda: world.engine.num_open == 24 and sum(t.done() for t in flood) == 3)
        for task in flood[3:]:
            answer = await task if task.done() else None
            if answer is not None:
                assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        others = [asyncio.create_task(ask(web, key, n=4)) for key in ("v", "nobody", "v")]
        await until(lambda: world.engine.num_open == 36)
        assert (await ask(web, "f")).status_code == 429
        assert (await ask(web, "v")).status_code == 429, "it has its third"
        world.engine.gate.set()
        answers = await asyncio.gather(*flood, *others)
        assert [a.status_code for a in answers].count(200) == 3 + 3

    run(world, scenario)


def test_made_up_prefixes_share_one_place(make_world: MakeWorld) -> None:
    """Without named keys nobody gets places beyond the limit by the names of adapters."""
    world = make_world(max_open=4)

    async def scenario(web: Web) -> None:
        for i in range(4):
            assert (await web.load(f"t{i}/x", world.adapter(f"a{i}", "x"))).status_code == 200
        world.engine.gate = asyncio.Event()
        asks = [
            asyncio.create_task(web.post(COMPLETE, {"model": f"t{i}/x", "prompt": "a", "n": 2}))
            for i in range(4)
        ]
        await until(lambda: world.engine.num_open == 4 and sum(t.done() for t in asks) == 2)
        world.engine.gate.set()
        codes = [answer.status_code for answer in await asyncio.gather(*asks)]
        assert sorted(codes) == [200, 200, 429, 429]

    run(world, scenario)


def test_caps_of_a_tenant() -> None:
    caps = Caps(max_open_requests=3, max_tokens_in_flight=100)
    admission = Admission(10, {"small": Tenant("small", caps=caps), "other": Tenant("other")})
    with pytest.raises(InvalidRequest), admission.enter(4, "small"):
        pass
    with pytest.raises(InvalidRequest) as refused, admission.enter(1, "small", 101):
        pass
    assert refused.value.param == "max_tokens"
    with admission.enter(2, "small", 60):
        for count, tokens in ((2, 0), (1, 41)):
            with pytest.raises(Overloaded), admission.enter(count, "small", tokens):
                pass
        with admission.enter(1, "small", 40), admission.enter(6, "other", 10**6):
            with pytest.raises(Overloaded):
                admission.check_early("small")
            admission.check_early("other")
            admission.check()
    assert admission.num_open == 0


def test_places_follow_weights_and_are_bounded() -> None:
    """Tenants come one after the other and each takes all that it gets."""
    tenants = {str(i): Tenant(str(i), weight=1.0 + i % 2) for i in range(30)}
    admission = Admission(300, tenants)

    def fill(places: ExitStack, name: str) -> int:
        for count in range(500):
            try:
                places.enter_context(admission.enter(1, name))
            except Overloaded as error:
                assert 1 <= int(error.headers["retry-after"]) <= 30
                return count
        raise AssertionError("no bound")

    with ExitStack() as places:
        assert fill(places, "0") == 300
        assert fill(places, "1") == 200, "two thirds"
        for name in list(tenants)[2:]:
            assert fill(places, name) >= 300 * tenants[name].weight // 45
        assert fill(places, "made up") >= 1
        assert fill(places, "another") == 0, "all who are unknown are one"
        assert admission.num_open < 300 * 4.5
        admission.check()
    assert admission.num_open == 0


def test_prefixes_are_shared_within_a_tenant(make_world: MakeWorld) -> None:
    """All routes salt the cache by tenant, and by the client's own salt besides."""
    tenants = {
        "a": Tenant("a"),
        "b": Tenant("b"),
        "open": Tenant("open", shares_prefixes=True),
        "wide": Tenant("wide", shares_prefixes=True),
    }
    world = make_world(api_keys=["a=1", "b=2", "open=3", "wide=4", "none"], tenants=tenants)

    async def scenario(web: Web) -> None:
        async def salt(key: str, path: str = COMPLETE, **body: Any) -> str:
            answer = await ask(web, key, path, **body)
            assert answer.status_code == 200, answer.text
            return world.engine.requests[-1].cache_salt

        keys = ("1", "2", "3", "none")
        salts = [await salt(key) for key in keys]
        assert len(set(salts)) == 4
        assert await salt("4") == salts[2], "both share"
        for path in (CHAT, COMPLETE):
            assert [await salt(key, path) for key in keys] == salts
            own = [await salt(key, path, cache_salt="1:a:") for key in keys]
            assert len({*own, *salts}) == 8
            assert own == [await salt(key, cache_salt="1:a:") for key in keys]

    run(world, scenario)


def test_without_tenants_all_share_prefixes(make_world: MakeWorld) -> None:
    world = make_world()

    async def scenario(web: Web) -> None:
        assert (await web.load("t/x", world.adapter("x", "x"))).status_code == 200
        for body in ({}, {"model": "t/x"}):
            await web.complete(**body)
            assert world.engine.requests[-1].cache_salt == ""
        body = {"model": "base", "input": "hi", "cache_salt": "mine"}
        assert (await web.post("/v1/responses", body)).status_code == 200
        assert world.engine.requests[-1].cache_salt == ":mine"

    run(world, scenario)


def test_caps_on_adapters(make_world: MakeWorld) -> None:
    """Each namespace has its own; what is refused leaves nothing in the engine."""
    caps = Caps(max_adapters=2, max_adapter_bytes=250)
    world = make_world(tenants={"a": Tenant("a", caps=caps), "b": Tenant("b")})

    async def scenario(web: Web) -> None:
        async def load(name: str, **more: Any) -> httpx.Response:
            return await web.load(name, world.adapter(name.replace("/", "-"), name), **more)

        for name in ("a/1", "a/2", "b/1", "b/2", "b/3", "1", "2", "3"):
            assert (await load(name)).status_code == 200
        answer = await load("a/3")
        assert answer.status_code == 400 and "may have 2" in answer.text
        assert answer.json()["error"]["code"] == "adapter_conflict", answer.text
        assert (await load("a/2")).status_code == 200, "it is there already"
        held = set(world.engine.holders)
        world.registry.retire("b/1")
        world.engine.num_bytes = 151
        answer = await load("a/2", load_inplace=True)
        assert answer.status_code == 400 and "may take 250" in answer.text
        assert (await load("b/1")).status_code == 200
        assert set(world.engine.holders) == held
        world.engine.num_bytes = 100
        assert (await web.unload("a/1")).status_code == 200
        assert (await load("a/3")).status_code == 200

    run(world, scenario)


def test_loads_leave_room_for_others() -> None:
    """One tenant's loads take three quarters of the places, in their order; what is beyond its
    cap is refused."""
    tenants = {"a": Tenant("a"), "b": Tenant("b"), "c": Tenant("c", caps=Caps(max_loads=2))}
    quotas = Quotas(AdapterRegistry(["base"], "/"), tenants, max_loads=4)
    ended: dict[str, asyncio.Event] = {}
    under_way: list[str] = []

    async def load(name: str) -> None:
        ended[name] = asyncio.Event()
        async with quotas.load(name):
            under_way.append(name)
            quotas.check()
            await ended[name].wait()
        quotas.check()

    async def settle() -> None:
        for _ in range(50):  # each wakes the next
            await asyncio.sleep(0)

    async def scenario() -> None:
        async def start(*names: str) -> list[asyncio.Task[None]]:
            tasks = [asyncio.create_task(load(name)) for name in names]
            await settle()
            return tasks

        async def end(*names: str) -> None:
            for name in names:
                ended[name].set()
            await settle()

        tasks = await start(*(f"a/{i}" for i in range(6)))
        assert under_way == ["a/0", "a/1", "a/2"]
        tasks += await start("b/0")
        assert under_way[3:] == ["b/0"], "it need not wait"
        tasks += await start("c/0", "c/1")
        with pytest.raises(Overloaded) as refused:
            await load("c/2")
        assert refused.value.headers["retry-after"]
        await end("a/0")
        assert under_way[4:] == ["c/0"], "a tenant with fewer is first"
        tasks[3].cancel()
        await end("b/0", "c/0")
        assert under_way[5:] == ["c/1", "a/4"], "a/3 has left"
        await end("a/1", "a/2", "a/4", "c/1")
        await end("a/5")
        await asyncio.gather(*tasks, return_exceptions=True)
        assert under_way[7:] == ["a/5"] and quotas._running.total() == 0

    asyncio.run(scenario())


def test_a_flood_keeps_nobody_else_waiting_for_a_seat() -> None:
    """Over a real engine: another tenant's request overtakes a flood that fills all seats, and
    what had to make way goes on with the same tokens. What one tenant asked, another can't tell."""
    num_awaited = 0
    """Once all seats are taken, no step is made before so many requests are there."""
    ended: list[str] = []
    """Whose requests have ended, in the engine's order."""
    flood, small = {"max_tokens": 80, "ignore_eos": True}, {"max_tokens": 4}
    greedy = {"prompt": list(range(3, 60)), "temperature": 0, "return_token_ids": True}

    def holds(engine: Engine) -> bool:
        nonlocal num_awaited
        scheduler = engine.scheduler
        if scheduler.num_running + scheduler.num_waiting >= num_awaited:
            num_awaited = 0
        return bool(num_awaited) and scheduler.num_running == 4

    def note_ends(client: LinkClient) -> None:
        dispatch = client.dispatch

        def noted(report: Report) -> None:
            events = [*report] if isinstance(report, Tokens) else []
            ids = [event.request_id for event in events if event.finish_reason is not None]
            ended.extend(client._streams[each].request.tenant for each in ids)
            dispatch(report)

        client.dispatch = noted  # type: ignore[method-assign]

    async def scenario() -> None:
        nonlocal num_awaited
        args = {
            "num_threads": 1,
            "num_blocks": 1000,
            "max_num_seqs": 4,
            "adapter_cache_dir": "none",
        }
        engine = await start_in_process(engine_args(str(BASE), **args))
        note_ends(engine)
        settings = ApiSettings(("base",), api_keys=tuple(KEYS))
        await engine.set_tenants(list(settings.tenants.values()))
        registry = AdapterRegistry(["base"], str(BASE))
        app = create_app(engine, registry, None, Sources(AdapterRoots([])), settings)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft")

        async def ask(key: str, **body: Any) -> Any:
            head = {"authorization": f"Bearer {key}"}
            answer = await http.post(COMPLETE, json={"model": "base", **body}, headers=head)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def cached(answer: Any) -> int:
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        try:
            async with http:
                assert [cached(await ask(key, **greedy, **small)) for key in "fvv"] == [0, 0, 48]
                assert cached(await ask("v", **greedy, **small, cache_salt="x")) == 0
                alone = await ask("f", **greedy, **flood)
                ended.clear()
                num_awaited = 8
                tasks = [asyncio.create_task(ask("f", **greedy, **flood)) for _ in range(6)]
                while (await engine.stats()).num_running < 4:
                    await asyncio.sleep(0.01)
                await asyncio.gather(*(ask(key, **greedy, **small) for key in ("v", "nobody")))
                assert sorted(ended[:2]) == ["", "victim"]
                assert (await engine.stats()).preemptions > 0
                for answer in await asyncio.gather(*tasks):
                    assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        finally:
            await engine.close()

    with held(holds):
        asyncio.run(scenario())
