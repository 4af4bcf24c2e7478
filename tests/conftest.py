"""What the tests of every tier share. The tiers are folders, by what their tests need:

- `pure`: neither torch nor another process;
- `cpu`: torch on the CPU, with engines in this process;
- `e2e`: servers and other processes, as users start them;
- `gpu`: a CUDA device.

`support` holds what several files import.

A test marked `exhaustive` proves a rule that a cheaper test proves too, on more families, sizes or
seeds. It is left out unless EXHAUSTIVE is set, as `make exhaustive` does.

A test may be an `async def`, which runs in an event loop of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import inspect
import os
import platform
import sys
import tempfile
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings
from patience import in_time
from workers import pytest_addoption, run_tests

__all__ = ["pytest_addoption"]

# Modules are imported until all tests are collected, which makes no garbage to speak of.
gc.disable()

# Images of adapters, of every process that tests start.
_caches = tempfile.TemporaryDirectory(prefix="weft-tests-")
os.environ["XDG_CACHE_HOME"] = _caches.name
# Each HTTP client reads all certificates that it is to trust. No test's server has one.
_first, _end, _ = certifi.contents().partition("-----END CERTIFICATE-----\n")
os.environ["SSL_CERT_FILE"] = f"{_caches.name}/certificate.pem"
Path(os.environ["SSL_CERT_FILE"]).write_text(_first + _end)
# Tests are imported before workers are forked, and ask torch whether there is a GPU: without the
# driver, which no forked process could use then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# matplotlib reads all fonts of the machine when it finds no list of them in its cache.
os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
# Triton's interpreter multiplies with NumPy. Where the processor has AVX2 and no AVX-512, the bits
# of a row then depend on the rows beside it, but not with the products for an older processor.
if platform.machine() == "x86_64":
    os.environ.setdefault("OPENBLAS_CORETYPE", "Sandybridge")

# CI runs the same examples every time; elsewhere every run explores.
settings.register_profile(
    "weft",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=500 if "EXHAUSTIVE" in os.environ else 25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("weft")


TOGETHER = {
    "tests/e2e/test_server.py": "tests/e2e/test_clients.py",  # a server
    "tests/e2e/test_compiling.py": "tests/e2e/test_waits.py",  # the process that compiles
    "tests/cpu/test_golden.py": "tests/e2e/test_ranks.py",  # the oracle's answers
    **dict.fromkeys(  # matplotlib
        [f"tests/cpu/test_bench_{name}.py" for name in ("adapters", "kernels", "start")],
        "tests/cpu/test_bench.py",
    ),
}
"""Files that share something with another one, which the same worker has to take."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files whose tests often wait for other processes alternate with files whose tests compute, so
    that cores are seldom idle. The tier with the shortest files comes last, so that workers end at
    about the same time."""
    files = sorted({item.path for item in items})
    turns = {}
    for tier in ("e2e", "cpu", "pure"):
        found = [file for file in files if tier in file.parts]
        turns |= {file: (tier == "pure", n / len(found)) for n, file in enumerate(found)}
    items.sort(key=lambda item: (turns.get(item.path, (False, 0.0)), item.path))
    if "EXHAUSTIVE" not in os.environ:
        again = {item for item in items if item.get_closest_marker("exhaustive") is not None}
        config.hook.pytest_deselected(items=[*again])
        items[:] = [item for item in items if item not in again]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop, and fails if it hangs."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(in_time(pyfuncitem.obj(**arguments)))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Tests run in `--workers` processes, if there are to be any."""
    return run_tests(session, TOGETHER) or None


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Where workers have run the tests, this process ends at once: Python would take seconds to let
    go of all that was imported."""
    session = config.pluginmanager.getplugin("session")
    if config.getoption("workers") and session is not None:
        _caches.cleanup()
        sys.stdout.flush()
        os._exit(session.exitstatus)


def pytest_collection_finish() -> None:
    """Python need not go through all that was imported whenever it looks for garbage, not even
    after a benchmark in this process, which lets go of what it froze."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # at the end all is let go
    gc.unfreeze = lambda: None  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor through what the tests of a file imported later."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
