"""Tenants: what their file may say, whose a key is, and which names a caller may use."""

from __future__ import annotations

import asyncio
import hashlib
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft import api
from weft.core.adapters import AdapterInfo, WeightedAdapter
from weft.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    PermissionDenied,
    Unauthorized,
    WeftError,
)
from weft.core.tenants import Caps, Tenant
from weft.registry import Access, AdapterRegistry, Caller
from weft.registry import access as registry_access
from weft.registry.tenants import Change, Directory
from weft.registry.tenants_file import TenantsFile, parse_tenants, tenants_as_json
from weft.serving.quotas import Quotas

NOW = datetime(2026, 11, 22, tzinfo=UTC)


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


FULL = f"""
[tenants.acme]
weight = 2
shares_prefixes = true
may_use = ["globex/sql", "initech/*"]
lora_roots = ["/srv/acme"]
caps = {{ max_open_requests = 64, max_adapters = 3 }}

[[tenants.acme.keys]]
id = "acme-app"
sha256 = "{sha("one")}"
roles = ["use"]
expires = 2026-12-01T00:00:00Z

[[tenants.acme.keys]]
id = "acme-ci"
sha256 = "{sha("two")}"
roles = ["use", "publish"]

[tenants.globex]
"""

# the file ---------------------------------------------------------------------------------------


def test_a_file_says_all_of_its_tenants() -> None:
    found = parse_tenants(FULL, [Path("/adapters")])
    acme, globex = found.members["acme"], found.members["globex"]
    assert (acme.tenant.weight, acme.tenant.shares_prefixes) == (2.0, True)
    assert acme.tenant.caps == Caps(max_open_requests=64, max_adapters=3)
    assert acme.may_use == {"globex/sql", "initech/*"} and not globex.may_use
    assert found.lora_roots("acme") == (Path("/srv/acme"),)
    assert found.lora_roots("globex") == (Path("/adapters/globex"),)
    assert found.lora_roots("nobody") == ()
    assert [t.name for t in found.tenants] == ["acme", "globex"]
    assert parse_tenants("") == Directory()


def test_the_example_of_the_documentation_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    example = page.partition("```toml\n")[2].partition("```")[0]
    found = parse_tenants(example)
    assert found.members.keys() == {"acme", "ops"}
    assert found.members["ops"].keys[0].roles == {"admin"}


KEY = f'{{id = "k", sha256 = "{"0" * 64}", roles = ["use"]}}'


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("tenant = 1", "tenant"),
        ("tenants = 1", "tenants"),
        ("[tenants", "tenants"),
        ("[tenants.a]\n[tenants.a]", "tenants"),
        ("[tenants.a]\n[tenants.A]", "tenants.A"),
        ('[tenants."a/b"]', 'tenants."a/b"'),
        ('[tenants.".."]', 'tenants.".."'),
        ("[tenants.a]\nwieght = 1", "tenants.a.wieght"),
        ("[tenants.a]\nweight = 0", "tenants.a.weight"),
        ("[tenants.a]\nweight = inf", "tenants.a.weight"),
        ('[tenants.a]\nweight = "2"', "tenants.a.weight"),
        ("[tenants.a]\nshares_prefixes = 1", "tenants.a.shares_prefixes"),
        ("[tenants.a.caps]\nmax_seats = 0", "tenants.a.caps.max_seats"),
        ("[tenants.a.caps]\nmax_seats = true", "tenants.a.caps.max_seats"),
        (f"[tenants.a.caps]\nmax_seats = {2**63}", "tenants.a.caps.max_seats"),
        ("[tenants.a.caps]\nseats = 1", "tenants.a.caps.seats"),
        ('[tenants.a]\nmay_use = ["sql"]', "tenants.a.may_use[0]"),
        ('[tenants.a]\nmay_use = ["b/x", "*/x"]', "tenants.a.may_use[1]"),
        ('[tenants.a]\nlora_roots = ["x"]', "tenants.a.lora_roots[0]"),
        ('[tenants.a]\nkeys = [{id = "k"}]', "tenants.a.keys[0].sha256"),
        (f"[tenants.a]\nkeys = [{KEY.replace('0', 'g', 1)}]", "tenants.a.keys[0].sha256"),
        (f"[tenants.a]\nkeys = [{KEY.replace('roles', 'role')}]", "tenants.a.keys[0].roles"),
        (f"[tenants.a]\nkeys = [{KEY.replace('use', 'root')}]", "tenants.a.keys[0].roles[0]"),
        (f"[tenants.a]\nkeys = [{KEY[:-1]}, expires = 2026-01-01}}]", "tenants.a.keys[0].expires"),
        (
            f"[tenants.a]\nkeys = [{KEY[:-1]}, expires = 2026-01-01T00:00:00}}]",
            "tenants.a.keys[0].expires",
        ),
        (f"[tenants.a]\nkeys = [{KEY}, {KEY}]", "tenants.a.keys[1].id"),
        (
            f"[tenants.a]\nkeys = [{KEY}]\n[tenants.b]\nkeys = [{KEY.replace('k', 'l', 1)}]",
            "tenants.b.keys[0].sha256",
        ),
        pytest.param(f"[tenants.a]\nweight = {'9' * 5000}", "tenants", id="many digits"),
        pytest.param(f"a = {'[' * 100_000}", "tenants", id="deep"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tenants(text)
    assert caught.value.param == place
    assert place in caught.value.message or "it is not TOML" in caught.value.message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[tenants.a]\nmay_use = ["sql"]', "it must be TENANT/ADAPTER, or TENANT/* for all"),
        (f"[tenants.a]\nkeys = [{KEY.replace('0', 'G', 1)}]", "it must be 64 hexadecimal digits"),
        ("[tenants.'a/b']", "it must be letters and digits of ASCII"),
        (f"[tenants.'{'a' * 65}']", "it must have at most 64 characters"),
        (
            f"[tenants.a]\nkeys = [{KEY[:-1]}, expires = 2027-01-01 }}]",
            "such as 2027-01-01T00:00:00Z",
        ),
        (f"[tenants.a]\nkeys = [{KEY[:-1]}, expires = 2027-01-01T00:00:00 }}]", "with a time zone"),
        (
            f"[tenants.a]\nkeys = [{KEY[:-1]}, expires = '2027-01-01T00:00:00Z' }}]",
            "without quotes",
        ),
        ("[tenants.a]\nkeys = [" + KEY.replace('"use"', "") + "]", "it must not be empty"),
        ("[tenants.a]\nkeys = 1", "it must be a list"),
        ("[tenants.a]\nkeys = [1]", "it must be a table"),
        ("[tenants.a]\nweight = 0", "it must be more than 0"),
        ("[tenants.a]\nweight = 'x'", "it must be a number"),
        ("[tenants.a]\nshares_prefixes = 1", "it must be true or false"),
        ("[tenants.a]\nmay_use = [1]", "it must be a text"),
        ("[tenants.a]\ncaps = 1", "it must be a table"),
        ("[tenants.a]\ncaps = { max_seats = 0 }", "it must be at least 1"),
        ("[tenants.a]\ncaps = { max_seats = 1.5 }", "it must be a whole number"),
        ("tenants = 1", "it must be a table"),
    ],
)
def test_what_has_another_form_is_refused_in_words(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        parse_tenants(text)


def test_a_registry_takes_no_cap_that_does_nothing_there() -> None:
    caps = "[tenants.a]\ncaps = { max_adapter_bytes = 5 }"
    assert parse_tenants(caps).members
    with pytest.raises(ConfigError, match="set max_stored_bytes instead") as caught:
        tenants_as_json(caps)
    assert caught.value.param == "tenants.a.caps.max_adapter_bytes"


def test_a_file_is_read_again_and_says_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(FULL)
    file = TenantsFile(path)
    assert file.reload() == []
    before = file.directory, file.keychain
    for broken in (FULL + "x = ", FULL + "x = 1", "\udcff", "# being written"):
        path.write_bytes(broken.encode(errors="surrogateescape"))
        with pytest.raises(ConfigError, match=r"--tenants .*tenants\.toml"):
            file.reload()
        assert (file.directory, file.keychain) == (before[0], file.keychain)
        assert file.keychain.caller(b"two", NOW).key_id == "acme-ci"
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        file.reload()
    text = FULL.replace('"globex/sql", ', '"globex/x", ').replace("weight = 2", "weight = 3")
    text = text.replace("acme-ci", "acme-new").replace('["use"]', '["admin"]')
    path.write_text(text.replace("[tenants.globex]", "[tenants.umbrella]"))
    assert set(file.reload()) == {
        Change("change tenant", "acme"),
        Change("change key", "acme", "acme-app"),
        Change("remove key", "acme", "acme-ci"),
        Change("add key", "acme", "acme-new"),
        Change("revoke", "acme", "globex/sql"),
        Change("grant", "acme", "globex/x"),
        Change("remove tenant", "globex"),
        Change("add tenant", "umbrella"),
    }
    assert file.keychain.caller(b"one", NOW).may("admin")


# keys -------------------------------------------------------------------------------------------


def test_keys_say_who_calls_until_they_expire() -> None:
    keys = parse_tenants(FULL).keychain()
    caller = keys.caller(b"one", NOW)
    assert (caller.tenant, caller.key_id, caller.roles) == ("acme", "acme-app", {"use"})
    assert caller.may("use") and not caller.may("publish") and not caller.may("admin")
    assert keys.caller(b"two", NOW + timedelta(days=999)).may("publish")
    with pytest.raises(Unauthorized, match=r"Expired.* valid until 2026-12-01T00:00:00"):
        keys.caller(b"one", datetime(2026, 12, 1, tzinfo=UTC))
    for wrong in (b"", b"three", b"onetwo", sha("one").encode()):
        with pytest.raises(Unauthorized, match="Incorrect"):
            keys.caller(wrong, NOW)


# names ------------------------------------------------------------------------------------------


def registry_of(*names: str) -> AdapterRegistry:
    registry = AdapterRegistry(["tiny", "org/tiny"], "/models/tiny")
    for name in names:
        registry.publish(name, AdapterInfo(sha(name), "/p", 4, 1, ()), f"/srv/{name}")
    return registry


def caller(tenant: str, *roles: str, may_use: frozenset[str] = frozenset()) -> Caller:
    return Caller(tenant, frozenset(roles or ("use", "publish")), "k", may_use)  # type: ignore[arg-type]


def named(access: Access, model: str) -> str | None:
    with access.resolve(model) as lease:
        return lease.ref and lease.ref.name


def test_a_bare_name_is_ones_own_and_then_a_shared_one() -> None:
    registry = registry_of("sql", "acme/sql", "globex/sql", "globex/x", "chat")
    acme = Access(registry, caller("acme", may_use=frozenset({"globex/x"})))
    for model, name in (
        ("sql", "acme/sql"), ("acme/sql", "acme/sql"), ("tiny:sql", "acme/sql"),
        ("org/tiny:acme/sql", "acme/sql"), ("chat", "chat"), ("tiny:chat", "chat"),
        ("globex/x", "globex/x"), ("tiny:globex/x", "globex/x"), ("tiny", None), ("org/tiny", None),
    ):  # fmt: skip
        assert named(acme, model) == name, model
    for model in (
        "globex/sql",
        "tiny:globex/sql",
        "x",
        "nobody/x",
        "acme/chat",
        "/sql",
        "",
        "tiny:",
    ):
        with pytest.raises(ModelNotFound):
            acme.resolve(model)
    assert [card.id for card in acme.models().cards] == [
        "tiny",
        "org/tiny",
        "acme/sql",
        "globex/x",
        "chat",
    ]
    assert {card.id: card.root for card in acme.models().cards} == {
        "tiny": "tiny", "org/tiny": "org/tiny", "acme/sql": "/srv/acme/sql",
        "globex/x": "globex/x", "chat": "chat",
    }  # fmt: skip
    assert {c.ref.name: c.path for c in acme.adapter_cards()} == {
        "acme/sql": "/srv/acme/sql", "globex/x": "globex/x", "chat": "chat",
    }  # fmt: skip
    admin = Access(registry, caller("ops", "admin"))
    assert named(admin, "sql") == "sql" and named(admin, "globex/sql") == "globex/sql"
    assert len(admin.adapter_cards()) == 5 and admin.card("tiny").root == "/models/tiny"


def test_one_publishes_and_retires_in_ones_own_namespace_only() -> None:
    registry = registry_of("sql", "acme/mine", "globex/x", "globex/y")
    acme = Access(registry, caller("acme", may_use=frozenset({"globex/x"})))
    for name in ("new", "acme/new"):
        assert acme.to_publish(name) == "acme/new"
    for name in ("globex/x", "globex/nowhere", "nobody/x", "tiny:globex/x", "/x", "org/x"):
        with pytest.raises(PermissionDenied) as caught:
            acme.to_publish(name)
        assert caught.value.param == "lora_name"
    refused = (("tiny", AdapterConflict), ("acme/tiny", AdapterConflict))
    for name, kind in (*refused, ("tiny:x", InvalidRequest), ("acme/", InvalidRequest)):
        with pytest.raises(kind):
            acme.to_publish(name)
    assert acme.to_retire("mine") == acme.to_retire("acme/mine") == "acme/mine"
    for name in ("sql", "globex/x"):
        with pytest.raises(PermissionDenied):
            acme.to_retire(name)
    for name in ("globex/y", "globex/nowhere", "nobody/x", "acme/nowhere", "nowhere"):
        with pytest.raises(AdapterNotFound) as gone:
            acme.to_retire(name)
        assert gone.value.message == f"The lora adapter {name!r} cannot be found"
    admin = Access(registry, caller("ops", "admin"))
    assert admin.to_publish("sql") == "sql" and admin.to_retire("globex/y") == "globex/y"


def test_each_role_may_do_its_own() -> None:
    registry = registry_of("sql")
    ci, app = Access(registry, caller("a", "publish")), Access(registry, caller("a", "use"))
    for denied in (
        lambda: ci.resolve("tiny"),
        lambda: ci.resolve("nowhere"),
        lambda: ci.resolve_sum([WeightedAdapter("sql")]),
        lambda: app.to_publish("x"),
        lambda: app.to_retire("nowhere"),
    ):
        with pytest.raises(PermissionDenied):
            denied()
    assert named(app, "sql") == "sql" and ci.to_publish("x") == "a/x"


NAMESPACES = ["a", "b", "tiny", "org"]
PLAIN = st.sampled_from(["x", "y", "tiny", "tiny:x"])
WHOLE = st.builds("{}/{}".format, st.sampled_from(NAMESPACES), PLAIN)
BASED = st.builds("{}:{}".format, st.sampled_from(["tiny", "org/tiny"]), WHOLE)
ASKED = st.one_of(PLAIN, WHOLE, BASED)
ALL_OF = st.sampled_from([f"{name}/*" for name in NAMESPACES])
GRANTS = st.frozensets(st.one_of(WHOLE, ALL_OF), max_size=3)


@given(
    steps=st.lists(st.tuples(st.sampled_from(NAMESPACES), GRANTS, ASKED, ASKED), max_size=12),
)
def test_no_caller_ever_gets_a_name_that_it_may_not_see(
    steps: list[tuple[str, frozenset[str], str, str]],
) -> None:
    """Whatever is published, granted and revoked, in whatever order."""
    registry, owner = registry_of("shared"), {"shared": ""}
    for tenant, grants, published, asked in steps:
        access = Access(registry, caller(tenant, may_use=grants))
        try:
            whole = access.to_publish(published)
            assert whole.startswith(f"{tenant}/")
            registry.publish(whole, AdapterInfo(sha(whole), "/p", 4, 1, ()), "/srv", replace=True)
            owner[whole] = tenant
        except WeftError:
            pass
        allowed = {
            name for name, of in owner.items() if of in ("", tenant) or {name, f"{of}/*"} & grants
        }
        assert {card.ref.name for card in access.adapter_cards()} == allowed
        for missing in (f"The {what} {asked!r} does not exist" for what in ("model", "adapter")):
            try:
                if "model" in missing:
                    ref = access.resolve(asked).ref
                else:
                    ref = access.resolve_sum([WeightedAdapter(asked)]).ref
                assert ref is None or ref.name in allowed
            except ModelNotFound as error:
                said, _, hint = error.message.partition("; ")
                assert said == missing
                if hint.startswith("did you mean "):
                    assert access.card(hint[len("did you mean '") : -2]), "only what it may see"
        # One of the base's names may be said before.
        name = asked.removeprefix("org/tiny:").removeprefix("tiny:")
        try:
            assert owner[access.to_retire(asked)] == tenant
        except PermissionDenied:
            assert name in allowed
        except AdapterNotFound:
            assert owner.get(name) != tenant and owner.get(f"{tenant}/{name}") != tenant
    registry.check()


def test_unknown_names_hold_up_nobody_however_many_are_like_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All other requests wait while a name like an unknown one is looked for, so few are compared:
    those first that begin as it does."""
    alike = ["".join(Random(n).choices("ab", k=64)) for n in range(500)]
    access = Access(registry_of(*alike[1:], "support-bot"), caller("acme"))
    with pytest.raises(ModelNotFound, match=r"did you mean 'support-bot'\?"):
        access.find("suport-bot")
    compared: list[str] = []
    monkeypatch.setattr(
        registry_access, "get_close_matches", lambda _, names, n: compared.extend(names) or []
    )
    with pytest.raises(ModelNotFound):
        access.find(alike[0])
    assert 0 < len(compared) < 10


def test_routes_know_the_registry_by_a_callers_view_only() -> None:
    """So that none of them, or of those to come, forgets to ask who asks."""
    files = Path(api.__file__).parent.rglob("*.py")
    knowing = {file.name for file in files if "AdapterRegistry" in file.read_text()}
    # Shadows run what a caller's request was routed to, and nobody sees what they answer.
    assert knowing == {"app.py", "service.py", "shadows.py"}


async def test_a_larger_cap_holds_for_loads_that_wait_already() -> None:
    tenants = {"a": Tenant("a", caps=Caps(max_loads=1))}
    quotas = Quotas(registry_of(), tenants)
    running, go = list[int](), [asyncio.Event() for _ in range(4)]

    async def load(number: int) -> None:
        async with quotas.place("a/x", patient=True):
            running.append(number)
            await go[number].wait()

    loads = [asyncio.create_task(load(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert running == [0]
    tenants["a"] = Tenant("a", caps=Caps(max_loads=3))
    go[0].set()
    await loads[0]
    await asyncio.sleep(0)
    assert running == [0, 1, 2, 3]
    quotas.check()
    for event in go:
        event.set()
    await asyncio.gather(*loads)
