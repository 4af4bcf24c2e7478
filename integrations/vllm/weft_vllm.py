"""vLLM takes its LoRA adapters from a shared registry of Weft."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from weft.core.errors import ConfigError
from weft.registry.blobs import Blobs
from weft.registry.contents import Contents, cache_folder
from weft.registry.names import one_form
from weft.registry.releases import main_number, number_of, split
from weft.registry.shared import SharedRegistry
from weft.registry.stores import open_store

Request = TypeVar("Request", covariant=True)


class MakeRequest(Protocol[Request]):
    """vLLM's `LoRARequest`."""

    def __call__(self, *, lora_name: str, lora_int_id: int, lora_path: str) -> Request: ...


class RegistryResolver(Generic[Request]):
    """A `vllm.lora.resolver.LoRAResolver`. The registry is opened when a name is first asked for,
    as vLLM loads its plug-ins into processes that never ask."""

    def __init__(
        self,
        open_registry: Callable[[], SharedRegistry],
        make: MakeRequest[Request],
        cache: Path | None,
    ) -> None:
        """`cache` is where the contents of a bucket are kept."""
        self._open = open_registry
        self._make = make
        self._contents = Contents(cache)
        self._lock = threading.Lock()
        self._registry: SharedRegistry | None = None

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Request | None:
        """What vLLM loads for a name; None if the registry has no such adapter. Raises WeftError
        if it does not answer, or the content is damaged."""
        return await asyncio.to_thread(self._resolve, lora_name)

    def _resolve(self, lora_name: str) -> Request | None:
        registry = self._opened()
        digest = _digest(registry, lora_name)
        if digest is None:
            registry.poll()  # it may have been published a moment ago
            digest = _digest(registry, lora_name)
        if digest is None:
            return None
        with Blobs(registry.store, self._contents).open(digest) as folder:
            # vLLM gives the request a number of its own; one is needed to make it.
            number = int(digest[:7], 16) + 1
            return self._make(lora_name=lora_name, lora_int_id=number, lora_path=folder.path)

    def _opened(self) -> SharedRegistry:
        with self._lock:
            if self._registry is None:
                self._registry = self._open()
                self._registry.start()
            return self._registry

    def close(self) -> None:
        """Stop following the registry."""
        with self._lock:
            if self._registry is not None:
                self._registry.close()
                self._registry = None


def _digest(registry: SharedRegistry, lora_name: str) -> str | None:
    name, version = split(one_form(lora_name))
    entry = registry.state.names.get(name)
    if entry is None or entry.removed_at is not None:
        return None
    number = number_of(entry, version) if version else main_number(entry.route)
    return None if number is None else entry.versions[number].digest


def register() -> None:
    """What vLLM calls when it starts. Raises ConfigError without WEFT_REGISTRY."""
    uri = os.environ.get("WEFT_REGISTRY")
    if not uri:
        message = "the plug-in weft_registry needs WEFT_REGISTRY: a folder, or s3://BUCKET/PREFIX"
        raise ConfigError(message, "registry")
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
    from vllm.lora.resolver import LoRAResolverRegistry  # type: ignore[import-not-found]

    cache = os.environ.get("WEFT_CACHE")
    resolver = RegistryResolver(
        lambda: SharedRegistry(open_store(uri)),
        LoRARequest,
        Path(cache) if cache else cache_folder(),
    )
    LoRAResolverRegistry.register_resolver("weft_registry", resolver)
