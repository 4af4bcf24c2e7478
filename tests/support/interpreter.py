"""Triton's interpreter, without those of its habits that take most of its time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_quick() -> None:
    """A kernel's own functions find the language as the launch has changed it for the interpreter,
    so that each call of one need not change it again. Integers are not checked for overflow, with
    64 bits beside each sum: tests' tensors are far too small for one. What follows from a type or
    from the dimensions of a block is worked out once, not for each value of that type. And where
    NumPy's rules for an operation on two types are Triton's, it gets their values at once.

    Products are summed in 64 bits and rounded once, so that their bits don't depend on the shapes
    of blocks, as those of NumPy's products do on some processors."""
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.interpreter_builder.options.__dict__["sanitize_overflow"] = False
    interpreter.interpreter_builder.create_dot = _dot
    interpreter._patch_attr = _patch_attr
    interpreter._get_np_dtype = _np_dtype
    interpreter.TensorHandle.__init__ = _init_handle
    core.dtype.__eq__ = _types_are_equal
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor
    core.tuple.__eq__ = _tuples_are_equal
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.computation_type_impl = _computation_type
    TritonSemantic.scalar_constant = _scalar_constant


def _call(self: Any, *args: Any, **options: Any) -> Any:
    """Triton's own functions have another name for the language, which is changed once for all."""
    if self.fn.__module__.startswith("triton.") and core.is_builtin(core.arange):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **options)


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    scope.set_attr(obj, name, _interpreted(name if obj is core.tensor else "", member))


@cache
def _interpreted(operator: str, member: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **options)

    reflected = operator.startswith("__r") and operator != "__rshift__"
    operator = "__" + operator[3:] if reflected else operator
    return _elementwise(operator, reflected, call) if operator in _OPERATORS else call


class _Work(NamedTuple):
    """What an operator does with the values of two types."""

    on_arrays: Callable[[Any, Any], Any]
    gives: Any
    """The type of each of the results."""
    blocks: dict[tuple[int, ...], Any]
    """The types of blocks of them, by dimensions."""


_ARITHMETIC = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
_BITS = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
_COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_DIVISIONS = {"__floordiv__": lambda x, y: (x - np.fmod(x, y)) // y, "__mod__": np.fmod}
"""Of integers: rounded towards 0, as processors do it."""
_OPERATORS = (
    _ARITHMETIC | _BITS | _COMPARISONS | _DIVISIONS | {"__truediv__": np.divide}  # of floats
)
_INTEGERS, _BOOLS, _FLOATS = {"int32", "int64"}, {"int1"}, {"fp32"}


def _elementwise(operator: str, reflected: bool, otherwise: Callable[..., Any]) -> Any:
    """The operator of a tensor with a tensor or a number. `otherwise` knows all types."""
    works: dict[tuple[str, str], _Work | None] = {}

    def call(self: Any, other: Any) -> Any:
        value = other.value if type(other) is core.constexpr else other
        mine, is_tensor = self.dtype, type(value) is core.tensor
        if is_tensor:
            its, value = value.dtype, value.handle.data
        elif (type(value) is int and -(1 << 31) <= value < 1 << 31 and mine.name in _INTEGERS) or (
            type(value) in (int, float) and mine.name == "fp32"
        ):
            its = mine
        else:
            return otherwise(self, other)
        key = mine.name, its.name
        work = works[key] if key in works else works.setdefault(key, _work(operator, mine, its))
        if work is None:
            return otherwise(self, other)
        data = self.handle.data
        made = work.on_arrays(value, data) if reflected else work.on_arrays(data, value)
        kind = work.gives
        if type(self.type) is core.block_type or (
            is_tensor and type(other.type) is core.block_type
        ):
            kind = work.blocks.get(made.shape)
            if kind is None:
                kind = work.blocks[made.shape] = core.block_type(work.gives, made.shape)
        return core.tensor(interpreter.TensorHandle(made, work.gives), kind)

    return call


def _work(operator: str, mine: Any, its: Any) -> _Work | None:
    """None where NumPy would give another type than Triton."""
    names = {mine.name, its.name}
    if operator == "__add__" and mine.is_ptr() and its.name in _INTEGERS:
        size = max(1, mine.element_ty.primitive_bitwidth // 8)
        return _Work(lambda places, steps: places + size * steps.astype(np.uint64), mine, {})
    kinds = [_INTEGERS, _FLOATS]
    if operator in _BITS:
        kinds = [_INTEGERS, _BOOLS]
    elif operator in _DIVISIONS or operator == "__truediv__":
        kinds = [_INTEGERS if operator in _DIVISIONS else _FLOATS]
    if not any(names <= kind for kind in kinds):
        return None
    wider = its if its.name == "int64" else mine
    return _Work(_OPERATORS[operator], core.int1 if operator in _COMPARISONS else wider, {})


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """Without a comparison of the sizes of both types."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


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
    dims = type.dims if isinstance(type, core.block_type) else _SCALAR
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


_constants: dict[tuple[str, str], Any] = {}
_make_constant = TritonSemantic.scalar_constant


def _scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
    """No operation changes its operands, so each number needs one tensor."""
    key = (repr(value), dtype.name)
    found = _constants.get(key)
    if found is None:
        found = _constants[key] = _make_constant(self, value, dtype)
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
