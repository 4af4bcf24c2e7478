"""Settings that server and helper processes apply to themselves."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def die_with_parent(parent_pid: int) -> None:
    """From now on the kernel kills this process when the parent's thread that started it ends, even
    if this process is stopped or hangs."""
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it was gone before
        os._exit(1)


def forbid_new_privileges() -> None:
    """From now on no program that this process starts has more rights than it has itself, whatever
    the program's file says."""
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, one, none, none, none)


def freeze_heap() -> None:
    """Exclude all objects that exist by now from garbage collection. Each collection would look at
    everything that was imported, for a tenth of a second."""
    gc.collect()
    gc.freeze()


def leave_out_torch() -> None:
    """Make imports of torch fail in this process, unless it has imported torch already. Tokenizers
    of transformers work without it, and importing both together takes seconds and 300 MB."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # importing it fails from now on
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # of torch, which is not there
