"""Triton's interpreter, without those of its habits that take most of its time."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_quick() -> None:
    """A kernel's own functions find the language as the launch has changed it for the interpreter,
    so that each call of one need not change it again. Integers are not checked for overflow, with
    64 bits beside each sum: tests' tensors are far too small for one. And what follows from a type
    or from the dimensions of a block is worked out once, not for each value of that type.

    Products are summed in 64 bits and rounded once, so that their bits don't depend on the shapes
    of blocks, as those of NumPy's products do on some processors."""
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.interpreter_builder.options.__dict__["sanitize_overflow"] = False
    interpreter.interpreter_builder.create_dot = _dot
    interpreter._patch_attr = _patch_attr
    interpreter._get_np_dtype = _np_dtype
    core.dtype.__eq__ = _types_are_equal
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor
    core.tuple.__eq__ = _tuples_are_equal
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.computation_type_impl = _computation_type


def _call(self: Any, *args: Any, **options: Any) -> Any:
    """Triton's own functions have another name for the language, which is changed once for all."""
    if self.fn.__module__.startswith("triton.") and core.is_builtin(core.arange):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **options)


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **options)

    scope.set_attr(obj, name, call)


def _dot(a: Any, b: Any, d: Any, *_: Any) -> Any:
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


_np_dtypes: dict[str, np.dtype[Any]] = {}
_np_dtype_of = interpreter._get_np_dtype


def _np_dtype(kind: Any) -> np.dtype[Any]:
    found = _np_dtypes.get(kind.name)
    if found is None:
        found = _np_dtypes[kind.name] = _np_dtype_of(kind)
    return found


_compare_types = core.dtype.__eq__


def _types_are_equal(self: Any, other: Any) -> bool:
    return self is other or bool(_compare_types(self, other))


class _Dims:
    """What follows from the dimensions of a block. Those of equal ones are the same object."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.of_type = core.tuple(sizes)
        self.text = str(self.of_type)
        self.of_tensor = core.tuple([core.constexpr(size) for size in sizes])
        self.numel = core.validate_block_shape(list(sizes))
        self.numel_of_tensor = core.constexpr(self.numel)


_dims = cache(_Dims)
_SCALAR = _Dims(())


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(d.value if isinstance(d, core.constexpr) else d for d in shape)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    dims = _dims(sizes)
    self.element_ty, self.shape, self.numel = element_ty, dims.of_type, dims.numel
    self.name = f"<{dims.text}, {element_ty}>"
    self.dims = dims


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    dims = type.dims if type.is_block() else _SCALAR
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = dims.of_tensor, dims.numel_of_tensor


_compare_tuples = core.tuple.__eq__


def _tuples_are_equal(self: Any, other: Any) -> Any:
    if self is other:
        return core.constexpr(True)
    if isinstance(other, list) and all(type(item) is int for item in other):
        return core.constexpr(self.values == other)
    return _compare_tuples(self, other)


_broadcast_any = TritonSemantic.broadcast_impl_value


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    found: tuple[Any, Any] = _broadcast_any(self, lhs, rhs)
    return found


_computation_types: dict[tuple[object, ...], Any] = {}
_computation_type_of = TritonSemantic.computation_type_impl


def _computation_type(
    self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool
) -> Any:
    key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
    found = _computation_types.get(key)
    if found is None:
        found = _computation_type_of(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        _computation_types[key] = found
    return found
