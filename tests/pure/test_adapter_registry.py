"""The registry: names, versions, leases, draining; and the folders adapters may come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from weft.core.adapters import AdapterInfo, AdapterRef
from weft.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    AdapterPathRefused,
    InvalidRequest,
    ModelNotFound,
)
from weft.core.files import ADAPTER_FILES
from weft.registry import AdapterRegistry, AdapterRoots, Lease, ModelCard
from weft.registry.access import Access
from weft.registry.tenants import Caller


def info(digest: str, path: str = "/adapters/x") -> AdapterInfo:
    return AdapterInfo(digest, path, max_rank=8, num_bytes=100, targets=("q_proj",))


def live_version(registry: AdapterRegistry, name: str) -> AdapterRef | None:
    return next((ref for ref in registry.adapters() if ref.name == name), None)


def models(registry: AdapterRegistry) -> list[ModelCard]:
    return Access(registry, Caller()).models().cards


@pytest.fixture
def registry():
    made = AdapterRegistry(["base", "org/base"], "/models/base")
    yield made
    made.check()


# names ----------------------------------------------------------------------------------------


def test_base_names_resolve_to_no_adapter(registry: AdapterRegistry):
    for name in ("base", "org/base"):
        with registry.resolve(name) as lease:
            assert lease.ref is None


def test_base_colon_adapter(registry: AdapterRegistry):
    first = registry.publish("a", info("d1"), "/a")
    for model in ("a", "base:a", "org/base:a"):
        assert registry.resolve(model).ref == first
        assert registry.card(model) == ModelCard("a", "/a", "base")
    for shadow in ("base:a", "org/base:a", "base:"):
        with pytest.raises(InvalidRequest, match="must not begin with"):
            registry.publish(shadow, info("d2"), "/b")
    assert registry.resolve("base:a").ref == first
    assert registry.card("org/base") == ModelCard("org/base", "/models/base", None)
    for model in ("base:b", "base:", "base:base", "other:a", "base:org/base:a"):
        with pytest.raises(ModelNotFound):
            registry.resolve(model)
        with pytest.raises(ModelNotFound):
            registry.card(model)


def test_a_base_name_may_hold_a_colon():
    registry = AdapterRegistry(["org/base", "org/base:latest"], "/m")
    ref = registry.publish("a", info("d1"), "/a")
    assert registry.resolve("org/base:latest").ref is None
    assert registry.resolve("org/base:latest:a").ref == ref


def test_unknown_model_is_not_found_never_the_base(registry: AdapterRegistry):
    with pytest.raises(ModelNotFound, match="nobody") as caught:
        registry.resolve("nobody")
    assert caught.value.param == "model"


def test_cards_name_root_and_parent(registry: AdapterRegistry):
    registry.publish("acme/bot", info("d1"), "/adapters/bot")
    assert models(registry) == [
        ModelCard("base", "/models/base", None),
        ModelCard("org/base", "/models/base", None),
        ModelCard("acme/bot", "/adapters/bot", "base"),
    ]
    assert list(registry.adapters()) == [AdapterRef("acme/bot", 1, "d1")]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 201,
        "a\nb",
        "a\0b",
        "a\x7fb",
        "a,b",
        "../a",
        "a..b",
        "/a",
        "\\a",
        " a",
        "a ",
        "\ud800",
    ],
)
def test_unsafe_names_are_refused(registry: AdapterRegistry, name: str):
    with pytest.raises(InvalidRequest) as caught, registry.reserve(name, "/p"):
        pass
    assert caught.value.param == "lora_name"
    with pytest.raises(InvalidRequest):
        registry.publish(name, info("d1"), "/p")


def test_the_base_models_name_is_taken(registry: AdapterRegistry):
    with pytest.raises(AdapterConflict), registry.reserve("base", "/p"):
        pass
    with pytest.raises(AdapterConflict):
        registry.publish("org/base", info("d1"), "/p")


def test_a_name_is_loaded_from_one_path_at_a_time(registry: AdapterRegistry):
    with registry.reserve("a", "/p"):
        with registry.reserve("a", "/p"), registry.reserve("b", "/q"):
            registry.check()
        with pytest.raises(AdapterConflict), registry.reserve("a", "/q"):
            pass
    with registry.reserve("a", "/q"):
        pass


def test_a_failed_load_frees_the_name(registry: AdapterRegistry):
    with pytest.raises(OSError), registry.reserve("a", "/p"):
        raise OSError
    with registry.reserve("a", "/q"):
        pass


# versions -------------------------------------------------------------------------------------


def test_the_same_content_keeps_the_version(registry: AdapterRegistry):
    first = registry.publish("a", info("d1"), "/p")
    assert registry.publish("a", info("d1"), "/q") is first
    assert registry.publish("a", info("d1"), "/q", replace=True) is first
    assert models(registry)[-1].root == "/q"


def test_a_card_tells_whether_its_own_name_pins_the_content(registry: AdapterRegistry):
    registry.publish("a", info("d1"), "/p", pinned=True)
    registry.publish("c", info("d2"), "/p")
    registry.publish("b", info("d1"), "/p", pinned=False)
    assert [card.pinned for card in registry.adapter_cards()] == [True, False, False]
    registry.publish("a", info("d1"), "/p", pinned=False)
    registry.publish("b", info("d1"), "/p", pinned=True)
    with pytest.raises(AdapterConflict):
        registry.publish("c", info("d1"), "/p", pinned=True)
    assert [card.pinned for card in registry.adapter_cards()] == [False, False, True]


def test_what_a_name_still_needs(registry: AdapterRegistry):
    """Content that comes back under its name while its first version drains is needed on."""
    first = registry.publish("a", info("d1"), "/p")
    lease = registry.resolve("a")
    second = registry.publish("a", info("d2"), "/p", replace=True)
    assert registry.needs(first) and registry.needs(second)
    third = registry.publish("a", info("d1"), "/p", replace=True)
    assert not registry.needs(second)
    lease.release()
    assert registry.needs(first) and registry.needs(third)
    assert not registry.needs(AdapterRef("b", 1, "d1"))
    registry.retire("a")
    assert not registry.needs(first)


def test_other_content_needs_replace(registry: AdapterRegistry):
    registry.publish("a", info("d1"), "/p")
    with pytest.raises(AdapterConflict) as caught:
        registry.publish("a", info("d2"), "/p")
    assert caught.value.param == "lora_name"
    drained: list[AdapterRef] = []
    lease = registry.resolve("a")
    ref = registry.publish("a", info("d2"), "/p", replace=True, on_drained=drained.append)
    assert ref == AdapterRef("a", 2, "d2")
    assert lease.ref == AdapterRef("a", 1, "d1")
    with registry.resolve("a") as new:
        assert new.ref == ref
    assert drained == []
    lease.release()
    assert drained == [AdapterRef("a", 1, "d1")]


def test_versions_go_on_after_retirement(registry: AdapterRegistry):
    registry.publish("a", info("d1"), "/p")
    registry.retire("a")
    assert registry.publish("a", info("d1"), "/p").version == 2


# leases and draining --------------------------------------------------------------------------


def test_versions_of_a_shared_registry_leave_nothing(registry: AdapterRegistry):
    def num_kept() -> int:
        return sum(len(each) for each in vars(registry).values() if isinstance(each, dict | set))

    before = num_kept()
    for number in range(1, 9):
        name = f"acme/sql@v{number}"
        ref = registry.publish(name, info(f"d{number}"), "/adapters/x", number=number)
        registry.check()
        assert ref.version == number and registry.retire(name) == ref
    assert num_kept() == before


def test_retire_without_leases_is_drained_at_once(registry: AdapterRegistry):
    ref = registry.publish("a", info("d1"), "/p")
    drained: list[AdapterRef] = []
    assert registry.retire("a", drained.append) == ref
    assert drained == [ref]
    with pytest.raises(AdapterNotFound):
        registry.retire("a")


def test_retire_waits_for_the_last_lease(registry: AdapterRegistry):
    ref = registry.publish("a", info("d1"), "/p")
    leases = [registry.resolve("a") for _ in range(3)]
    drained: list[AdapterRef] = []
    assert registry.retire("a", drained.append) == ref
    with pytest.raises(ModelNotFound):
        registry.resolve("a")
    assert [card.id for card in models(registry)] == ["base", "org/base"]
    for lease in leases:
        assert drained == []
        lease.release()
        lease.release()
    assert drained == [ref]


def test_a_callback_may_use_the_registry(registry: AdapterRegistry):
    registry.publish("a", info("d1"), "/p")
    lease = registry.resolve("a")
    seen: list[AdapterRef | None] = []

    def publish_again(ref: AdapterRef) -> None:
        seen.append(live_version(registry, "a"))
        registry.publish("a", info("d2"), "/p")

    registry.retire("a", publish_again)
    lease.release()
    assert seen == [None] and live_version(registry, "a") == AdapterRef("a", 2, "d2")
    assert registry.resolve("a").ref == AdapterRef("a", 2, "d2")


NAMES = st.sampled_from(["a", "b", "c"])
DIGESTS = st.sampled_from(["d1", "d2", "d3"])


class RegistryMachine(RuleBasedStateMachine):
    """Against a model that remembers every lease."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.registry = AdapterRegistry(["base"], "/base")
        self.live: dict[str, AdapterRef] = {}
        self.held: dict[Lease, AdapterRef] = {}
        self.retired: list[AdapterRef] = []
        self.drained: list[AdapterRef] = []
        self.highest: dict[str, int] = {}
        self.pins: dict[str, bool] = {}

    def on_drained(self, ref: AdapterRef) -> None:
        assert ref in self.retired and ref not in self.drained
        assert ref not in self.held.values()
        self.drained.append(ref)

    @rule(name=NAMES, digest=DIGESTS, replace=st.booleans(), pinned=st.booleans())
    def publish(self, name: str, digest: str, replace: bool, pinned: bool) -> None:
        old = self.live.get(name)
        if old is not None and old.digest != digest:
            if not replace:
                with pytest.raises(AdapterConflict):
                    self.registry.publish(name, info(digest), "/p", pinned=pinned)
                return
            self.retired.append(old)
        ref = self.registry.publish(name, info(digest), "/p", replace, self.on_drained, pinned)
        if old is not None and old.digest == digest:
            assert ref == old
        else:
            assert ref.version > self.highest.get(name, 0)
            self.highest[name] = ref.version
        self.live[name] = ref
        self.pins[name] = pinned

    @rule(target=leases, name=NAMES)
    def resolve(self, name: str) -> Lease:
        if name not in self.live:
            with pytest.raises(ModelNotFound):
                self.registry.resolve(name)
            return self.registry.resolve("base")
        lease = self.registry.resolve(name)
        assert lease.ref == self.live[name]
        self.held[lease] = lease.ref
        return lease

    @rule(lease=consumes(leases), times=st.integers(1, 2))
    def release(self, lease: Lease, times: int) -> None:
        self.held.pop(lease, None)
        for _ in range(times):
            lease.release()

    @rule(name=NAMES)
    def retire(self, name: str) -> None:
        if name not in self.live:
            with pytest.raises(AdapterNotFound):
                self.registry.retire(name)
            return
        self.retired.append(self.live.pop(name))
        self.registry.retire(name, self.on_drained)

    @invariant()
    def drained_exactly_when_no_lease_is_left(self) -> None:
        self.registry.check()
        held = set(self.held.values())
        assert set(self.drained) == {ref for ref in self.retired if ref not in held}
        assert {card.id for card in models(self.registry)} == {"base", *self.live}
        assert {ref.name: ref for ref in self.registry.adapters()} == self.live
        for card in self.registry.adapter_cards():
            assert card.pinned is self.pins[card.ref.name]
        needed = {(ref.name, ref.digest) for ref in (*held, *self.live.values())}
        for ref in (*self.live.values(), *self.retired):
            assert self.registry.needs(ref) is ((ref.name, ref.digest) in needed)


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


# names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["b\u043et", "bot\ufe0f", "bo\u115ft"])
def test_names_that_look_like_another_are_refused(other: str) -> None:
    """Whichever comes first, and of the base's names too."""
    for first, second in (("bot", other), (other, "bot")):
        registry = AdapterRegistry(["b\u0430se"], "/base")
        registry.publish(first, info("d1"), "/a")
        with pytest.raises(AdapterConflict, match="looks like") as caught:
            publish(registry, second)
        assert caught.value.param == "lora_name"
        with pytest.raises(AdapterConflict, match="looks like"), registry.reserve(second, "/b"):
            pass
        with pytest.raises(AdapterConflict, match="looks like"):
            publish(registry, "base")
        registry.retire(first)
        publish(registry, second)
        registry.check()


def test_names_in_ascii_are_told_apart() -> None:
    registry = AdapterRegistry(["base"], "/base")
    for name in ("bot", "Bot", "b0t", "bo-t", "café", "cafe", "日本", "бот"):
        publish(registry, name)
    registry.check()


def publish(registry: AdapterRegistry, name: str) -> None:
    registry.publish(name, info(f"digest of {name}"), "/a")


def test_names_are_looked_up_in_one_form() -> None:
    registry = AdapterRegistry(["base"], "/base")
    access = Access(registry, Caller())
    name = access.to_publish("cafe\u0301 \uff21\uff11")
    assert name == "caf\u00e9 A1"
    publish(registry, name)
    for spelled in (name, "cafe\u0301 A1", "base:cafe\u0301 \uff211"):
        with access.resolve(spelled) as lease:
            assert lease.ref is not None and lease.ref.name == name
    assert access.to_retire("cafe\u0301 A1") == name
    with pytest.raises(InvalidRequest, match="NFKC"):
        publish(registry, "cafe\u0301")


# paths ----------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """root/bot and root/deep/bot are adapters; outside/bot is one that is out of bounds."""
    for folder in ("root/bot", "root/deep/bot", "other/only", "outside/bot"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (tmp_path / folder / name).write_bytes(b"{}")
    return tmp_path


@pytest.fixture
def roots(tree: Path) -> AdapterRoots:
    return AdapterRoots([tree / "root", tree / "other"])


def read(roots: AdapterRoots, path: str | Path) -> Path:
    """The real path of a folder, of which all files were read."""
    with roots.open(str(path)) as folder:
        for name in ADAPTER_FILES:
            folder.read(name, 1 << 20)
        assert Path(folder.path).is_relative_to(folder.root)
        return Path(folder.path)


def refused(roots: AdapterRoots, path: str | Path) -> None:
    with pytest.raises(AdapterPathRefused) as caught:
        read(roots, path)
    assert caught.value.param == "lora_path"


def test_paths_inside_a_root(tree: Path, roots: AdapterRoots):
    assert read(roots, tree / "root/bot") == (tree / "root/bot").resolve()
    assert read(roots, "deep/bot") == (tree / "root/deep/bot").resolve()
    assert read(roots, "only") == (tree / "other/only").resolve()


@pytest.mark.parametrize("path", ["", "../outside/bot", "deep/../bot", "bot\0", "bot\n", "\ud800"])
def test_odd_paths_are_refused(roots: AdapterRoots, path: str):
    refused(roots, path)


def test_paths_outside_are_refused_whether_they_exist_or_not(tree: Path, roots: AdapterRoots):
    refused(roots, tree / "outside/bot")
    refused(roots, tree / "outside/none")
    refused(roots, tree / "rootless")
    refused(AdapterRoots([]), "bot")


@pytest.mark.parametrize("path", ["none", "deep/none", "bot/adapter_config.json", "x" * 300])
def test_missing_folders_are_not_found(tree: Path, roots: AdapterRoots, path: str):
    for spelled in (path, str(tree / "root" / path)):
        with pytest.raises(AdapterNotFound):
            read(roots, spelled)


def test_links_must_stay_inside(tree: Path, roots: AdapterRoots):
    (tree / "root/good").symlink_to(tree / "other/only")
    (tree / "root/bad").symlink_to(tree / "outside/bot")
    (tree / "root/loop").symlink_to(tree / "root/loop")
    (tree / "link").symlink_to(tree / "root")
    assert read(roots, "good") == (tree / "other/only").resolve()
    assert read(roots, tree / "link/bot") == (tree / "root/bot").resolve()
    refused(roots, "bad")
    refused(roots, tree / "root/bad")
    with pytest.raises((AdapterPathRefused, AdapterNotFound)):
        read(roots, "loop")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_linked_files_must_stay_inside(tree: Path, roots: AdapterRoots, name: str):
    """A hub cache's snapshot links to ../../blobs, which is inside the cache."""
    snapshot = tree / "root/models--x/snapshots/1"
    blobs = tree / "root/models--x/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_bytes(b"{}")
    (snapshot / name).symlink_to(Path("../../blobs/abc"))
    assert read(roots, snapshot) == snapshot.resolve()
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(tree / "outside/bot" / name)
    refused(roots, snapshot)


def test_a_linked_root(tree: Path):
    (tree / "alias").symlink_to(tree / "root")
    roots = AdapterRoots([tree / "alias"])
    assert read(roots, "bot") == (tree / "root/bot").resolve()
    assert read(roots, tree / "root/bot") == (tree / "root/bot").resolve()


def test_names_can_be_arranged(registry: AdapterRegistry) -> None:
    for name in ("b", "c", "a"):
        registry.publish(name, info(name), name)
    registry.arrange(["a", "b"])
    assert list(registry.names()) == ["c", "a", "b"]
