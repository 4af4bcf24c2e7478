"""Code that compiles kernels for a GPU that is not there, in processes of its own, as the tests'
process interprets kernels."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quick_start import Forked

RunWithoutDevice = Callable[[Path, str], str]

FORK_SERVER = '''
import os, runpy, socket, sys, traceback
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
link = socket.socket(fileno=int(sys.argv[1])).makefile("rw", buffering=1)
for line in link:
    child = os.fork()
    if not child:
        os.chdir(line.rstrip("\\n"))
        run_script()
    link.write(f"{os.waitpid(child, 0)[1]}\\n")
'''


@pytest.fixture(scope="session")
def run_without_device() -> Iterator[RunWithoutDevice]:
    """Runs code in a folder, and returns what it prints. Each time it is a fresh process, forked
    from one that has imported torch and Triton already, as that takes longer than most code."""
    ours, theirs = socket.socketpair()
    with pytest.MonkeyPatch.context() as patch, theirs:
        patch.setenv("TRITON_INTERPRET", "0")
        server = Forked(1, 2, theirs.fileno(), code=FORK_SERVER)
    with ours, ours.makefile("rw", buffering=1) as link:

        def run(folder: Path, code: str) -> str:
            (folder / "script.py").write_text(code)
            link.write(f"{folder}\n")
            status = link.readline()
            assert status == "0\n", (folder / "errors").read_text()
            return (folder / "printed").read_text()

        yield run
    assert server.wait() == 0
