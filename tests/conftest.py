"""What the tests of every tier share. The tiers are folders, by what their tests need:

- `pure`: neither torch nor another process;
- `cpu`: torch on the CPU, with engines in this process;
- `e2e`: servers and other processes, as users start them;
- `gpu`: a CUDA device.

`support` holds what several files import.

A test marked `exhaustive` proves a rule that a cheaper test proves too, on more families, sizes or
seeds. It is skipped unless EXHAUSTIVE is set, as `make exhaustive` does.
"""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
from hypothesis import settings

# Images of adapters, of every process that tests start.
_caches = tempfile.TemporaryDirectory(prefix="weft-tests-")
os.environ["XDG_CACHE_HOME"] = _caches.name

# CI runs the same examples every time; elsewhere every run explores.
settings.register_profile("weft", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("weft")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` a file's tests stay together, as they share engines, and so do files
    that name the same group, as they share a server."""
    for item in items:
        if item.get_closest_marker("exhaustive") is not None and "EXHAUSTIVE" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="one of `make exhaustive`"))
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish() -> None:
    """Python need not go through all that was imported whenever it looks for garbage."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end all is let go."""
    gc.unfreeze()
