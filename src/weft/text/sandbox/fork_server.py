"""The process that worker processes for texts are forked from; see `weft.core.forked`."""

from __future__ import annotations

import sys
import time
from typing import NoReturn

from weft.core.forked import WorkerTask, run_fork_server
from weft.core.processes import freeze_heap, leave_out_torch
from weft.text.sandbox.limits import FILE_BYTES, MEMORY_BYTES, WorkerKind
from weft.text.sandbox.work import serve

COMMAND = "from weft.text.sandbox.fork_server import main; main()"


def main() -> NoReturn:
    time.localtime()  # workers can't open the file of the time zone
    run_fork_server(_prepare)


def _prepare(kind: bytes) -> WorkerTask:
    """Import what workers of this kind can't import themselves. Only the first time is slow."""
    loads = kind[0] == WorkerKind.LOADS
    if kind[0] == WorkerKind.TEXTS:
        import tokenizers  # noqa: F401
    elif "transformers" not in sys.modules:
        leave_out_torch()
        from transformers import AutoTokenizer  # noqa: F401

        from weft.text.sandbox.work import rehearse

        rehearse()
    freeze_heap()
    return WorkerTask(serve, MEMORY_BYTES, FILE_BYTES if loads else 0)
