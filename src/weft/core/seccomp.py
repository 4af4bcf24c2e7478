"""Restricts the system calls of this process for good, by a filter in the kernel.

It needs Linux on x86-64 or 64-bit Arm, but no privileges. A call that is not listed fails with
EPERM, so that code which can do without it continues.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _MACHINE_AT = 0, 4
"""The offsets of a call's number and architecture in the kernel's record of it."""
_X32 = 0x40000000
"""Numbers from here on are of the x32 ABI, another table under the same architecture."""
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the column of the tables below, and the kernel's number of the architecture."""

_COMPUTE = """
read 0 63, write 1 64, close 3 57, fstat 5 80, poll 7 -, lseek 8 62, mmap 9 222, mprotect 10 226,
munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
readv 19 65, writev 20 66, sched_yield 24 124, mremap 25 216, madvise 28 233, nanosleep 35 101,
getitimer 36 102, setitimer 38 103, getpid 39 172, sendto 44 206, recvfrom 45 207, exit 60 93,
uname 63 160, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179,
times 100 153, getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173,
sigaltstack 131 132, gettid 186 178, time 201 -, futex 202 98, sched_getaffinity 204 123,
restart_syscall 219 128, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
exit_group 231 94, ppoll 271 73, set_robust_list 273 99, getrandom 318 278, membarrier 324 283,
rseq 334 293
"""
"""By name, the numbers on x86-64 and on 64-bit Arm. These calls compute, take memory, and use what
is open already; none of them opens a file or connection, or starts a program or process."""
_FILES = """
open 2 -, stat 4 -, lstat 6 -, ioctl 16 29, pread64 17 67, pwrite64 18 68, access 21 -, dup 32 23,
fcntl 72 25, flock 73 32, fsync 74 82, ftruncate 77 46, getcwd 79 17, mkdir 83 -, rmdir 84 -,
unlink 87 -, readlink 89 -, getdents64 217 61, openat 257 56, mkdirat 258 34, newfstatat 262 79,
unlinkat 263 35, renameat 264 38, readlinkat 267 78, faccessat 269 48, statx 332 291,
faccessat2 439 439
"""
"""The further calls of a process that may use files."""


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def allow_only_computing(files: bool) -> bool:
    """From now on this process may only compute, and with `files` use files. Call
    `forbid_new_privileges` before. Returns False, and changes nothing, without such a filter."""
    machine = platform.machine()
    if machine not in _MACHINES or sys.byteorder != "little":
        return False
    column, architecture = _MACHINES[machine]
    program = _program(_numbers(column, _COMPUTE + ("," + _FILES if files else "")), architecture)
    record = _Filter(len(program) // 8, program)
    none = ctypes.c_ulong(0)
    prctl = ctypes.CDLL(None).prctl
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    return int(prctl(_PR_SET_SECCOMP, mode, ctypes.byref(record), none, none)) == 0


def _numbers(column: int, table: str) -> list[int]:
    rows = [row.split() for row in table.split(",")]
    return [int(row[1 + column]) for row in rows if row[1 + column] != "-"]


def _program(allowed: list[int], architecture: int) -> bytes:
    """The filter's instructions, of 8 bytes each. A jump states how many of them it skips."""

    def instruction(code: int, value: int, then: int = 0) -> bytes:
        return struct.pack("<HBBI", code, then, 0, value)

    checks = [
        instruction(_JUMP_IF_EQUAL, number, then=len(allowed) - at)
        for at, number in enumerate(allowed)
    ]
    return b"".join(
        [
            instruction(_LOAD, _MACHINE_AT),
            instruction(_JUMP_IF_EQUAL, architecture, then=1),
            instruction(_RETURN, _KILL),
            instruction(_LOAD, _NUMBER_AT),
            instruction(_JUMP_IF_AT_LEAST, _X32, then=len(checks)),
            *checks,
            instruction(_RETURN, _REFUSE),
            instruction(_RETURN, _ALLOW),
        ]
    )
