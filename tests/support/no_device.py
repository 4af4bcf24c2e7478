"""Another process, which compiles kernels for a GPU that is not there; tests interpret them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SETUP = '''
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class NoDevice:
    """What the compiler asks of a driver; there is nothing to launch with."""
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

driver.set_active(NoDevice())
'''


def run(folder: Path, code: str) -> str:
    """What the code prints; it runs in `folder`."""
    (folder / "script.py").write_text(SETUP + code)
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "kernels")}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout
