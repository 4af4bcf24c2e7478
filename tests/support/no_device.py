"""Code that compiles kernels for a GPU that is not there, in processes of its own, as the tests'
process interprets kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RunWithoutDevice = Callable[[Path, str], str]

FORK_SERVER = '''
import os, runpy, sys, traceback
import torch
import weft.kernels.attention.paged, weft.kernels.collective.triton_sums, weft.kernels.compiling
import weft.kernels.lora, weft.kernels.lora.triton, weft.kernels.quant.triton_packed
import weft.kernels.triton_delta, weft.kernels.triton_experts, weft.kernels.tuned
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

class NoDevice:
    """What the compiler asks of a driver; there is nothing to launch with."""
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

def run_script():
    for fd, name in ((1, "printed"), (2, "errors")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    code = 1
    try:
        os.environ["TRITON_CACHE_DIR"] = os.path.abspath("kernels")
        runpy.run_path("script.py")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

driver.set_active(NoDevice())
triton_key()  # the hash of the whole compiler, which each process would take again
for line in sys.stdin:
    child = os.fork()
    if not child:
        os.chdir(line.rstrip("\\n"))
        run_script()
    print(os.waitpid(child, 0)[1], flush=True)
'''


@pytest.fixture(scope="session")
def run_without_device() -> Iterator[RunWithoutDevice]:
    """Runs code in a folder, and returns what it prints. Each time it is a fresh process, forked
    from one that has imported torch and Triton already, as that takes longer than most code."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", FORK_SERVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as server:

        def run(folder: Path, code: str) -> str:
            (folder / "script.py").write_text(code)
            assert server.stdin is not None and server.stdout is not None
            server.stdin.write(f"{folder}\n")
            status = server.stdout.readline()
            assert status == "0\n", (folder / "errors").read_text()
            return (folder / "printed").read_text()

        yield run
