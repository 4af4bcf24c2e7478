"""The plug-in for vLLM, against the part of its interface that a plug-in meets: `LoRARequest` and
the registry of resolvers, as vLLM's sources have them."""

from __future__ import annotations

import asyncio
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from memory_store import MemoryStore
from packed_adapters import adapter, digest, read, written

import weft
from weft.core.errors import ConfigError
from weft.registry.blobs import Blobs
from weft.registry.contents import Contents
from weft.registry.records import Publish, Release, Remove, Route, Share
from weft.registry.shared import SharedRegistry

PLUGIN = Path(__file__).parents[2] / "integrations" / "vllm"


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        assert self.lora_int_id >= 1 and self.lora_path


class LoRAResolverRegistry:
    resolvers: ClassVar[dict[str, object]] = {}

    @classmethod
    def register_resolver(cls, resolver_name: str, resolver: object) -> None:
        cls.resolvers[resolver_name] = resolver


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name in ("vllm", "vllm.lora", "vllm.lora.request", "vllm.lora.resolver"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.lora.request"].LoRARequest = LoRARequest  # type: ignore[attr-defined]
    sys.modules["vllm.lora.resolver"].LoRAResolverRegistry = (  # type: ignore[attr-defined]
        LoRAResolverRegistry
    )
    monkeypatch.syspath_prepend(PLUGIN)
    import weft_vllm

    yield weft_vllm
    for resolver in LoRAResolverRegistry.resolvers.values():
        resolver.close()  # type: ignore[attr-defined]
    LoRAResolverRegistry.resolvers.clear()


def test_names_and_versions_become_folders(
    plugin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {
        "weft_registry": f"{plugin.__name__}:{plugin.register.__name__}"
    }
    place, (old, new) = tmp_path / "registry", (adapter(0), adapter(1))
    monkeypatch.delenv("WEFT_REGISTRY", raising=False)
    with pytest.raises(ConfigError, match="WEFT_REGISTRY"):
        plugin.register()
    monkeypatch.setenv("WEFT_REGISTRY", str(place))
    plugin.register()
    resolver = LoRAResolverRegistry.resolvers["weft_registry"]

    def resolved(name: str) -> LoRARequest | None:
        return asyncio.run(resolver.resolve_lora("base", name))  # type: ignore[attr-defined]

    weft.publish(place, "acme/sql", written(tmp_path / "a", old))
    weft.publish(place, "acme/sql", written(tmp_path / "b", new), release=False)
    for name, files in (
        ("acme/sql", old),
        ("acme/sql@v1", old),
        ("acme/sql@v2", new),
        (f"acme/sql@sha256:{digest(new)}", new),
    ):
        request = resolved(name)
        assert request is not None and request.lora_name == name
        assert request.lora_path == str(place / "blobs" / "sha256" / digest(files))
        assert files.items() <= read(Path(request.lora_path)).items()
    assert resolved("acme") is None and resolved("acme/sql@v3") is None
    with SharedRegistry(resolver._open().store) as shared:  # type: ignore[attr-defined]
        shared.change(Release("acme/sql", Route((Share(1, 1.0), Share(2, 9.0)))))
        resolver._registry.poll()  # type: ignore[attr-defined]
        request = resolved("acme/sql")
        assert request is not None and request.lora_path.endswith(digest(new))
        shared.change(Remove("acme/sql"))
    resolver._registry.poll()  # type: ignore[attr-defined]
    assert resolved("acme/sql") is None


def test_a_bucket_is_downloaded(plugin: ModuleType, tmp_path: Path) -> None:
    store, files = MemoryStore(), adapter()
    with SharedRegistry(store) as shared:
        shared.change(Publish("a", Blobs(store).put(files)))
        resolver = plugin.RegistryResolver(lambda: shared, LoRARequest, tmp_path / "cache")
        request = asyncio.run(resolver.resolve_lora("base", "a"))
        assert read(Path(request.lora_path)) == files
        assert Contents(tmp_path / "cache") and request.lora_path.startswith(str(tmp_path))
