"""Triton's interpreter, without two of its habits that take almost half of its time."""

from __future__ import annotations

from typing import Any

from triton.language import core
from triton.runtime import interpreter


def make_quick() -> None:
    """A kernel's own functions find the language as the launch has changed it for the interpreter,
    so that each call of one need not change it again. And integers are not checked for overflow,
    with 64 bits beside each sum: tests' tensors are far too small for one."""
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.interpreter_builder.options.__dict__["sanitize_overflow"] = False


def _call(self: Any, *args: Any, **options: Any) -> Any:
    """Triton's own functions have another name for the language, which is changed once for all."""
    if self.fn.__module__.startswith("triton.") and core.is_builtin(core.arange):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **options)
