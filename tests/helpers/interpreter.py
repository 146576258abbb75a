"""Triton 3.6's interpreter, without what it does again at every call and every tensor.

Kernels compute what they compute without this, in a third of the time.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_language = interpreter._patch_lang
_patch_tensor = interpreter._patch_lang_tensor
_broadcast = TritonSemantic.broadcast_impl_value
_cast = TritonSemantic.cast
_unwrap = language.core._unwrap_if_constexpr
_operands = TritonSemantic.binary_op_type_checking_impl
_make_block_type = language.block_type.__init__


def install() -> None:
    """Change the interpreter of this process."""
    interpreter._patch_lang_tensor = _patch_tensor_for_numpy
    interpreter._patch_lang = lambda kernel: _patch_language_once()
    interpreter._patch_attr = _patch_attribute
    interpreter.InterpretedFunction.__call__ = _call_device_function
    interpreter._get_np_dtype = _numpy_type
    language.tensor.__init__ = _make_tensor
    language.block_type.__init__ = _make_known_block_type
    language.tuple.__eq__ = _are_equal
    language.core._unwrap_if_constexpr = _unwrap_if_needed
    interpreter.TensorHandle.__init__ = _make_handle
    interpreter.ReduceOps.generic_reduce = _reduce_slices
    TritonSemantic.cast = _cast_other_types
    TritonSemantic.broadcast_impl_value = _broadcast_other_shapes
    TritonSemantic.binary_op_type_checking_impl = _operands_of_one_type
    # Sums and products would be looked at for overflow, and what is found ignored without debug.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_tensor_for_numpy(tensor, scope):
    # Loop bounds are read by int() of a one-element array, which numpy 2.4 refuses.
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@cache
def _patch_language_once():
    # Triton's own device functions name the language `core`.
    _patch_language(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    return SimpleNamespace(restore=lambda: None)


def _call_device_function(self, *args, **kwargs):
    # Triton patches the language once more here, which takes longer than most calls.
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


_numpy_type_of_scalar = cache(interpreter._get_np_dtype)


def _numpy_type(dtype):
    if dtype.scalar.is_ptr():
        return _numpy_type_of_scalar(language.uint64)
    return _numpy_type_of_scalar(dtype.scalar)


def _patch_attribute(target, name, member, builder, scope):
    # Triton's own checks at every call that a kernel's arguments name the semantic.
    semantic, function = TritonSemantic(builder), inspect.unwrap(member)

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    operation = _OF_NUMPY.get(name) if target is language.tensor else None
    scope.set_attr(target, name, _elementwise(operation, call) if operation else call)


_COMPARISONS = {
    f"__{name}__": getattr(np, numpy_name)
    for name, numpy_name in (
        *(("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal")),
        *(("eq", "equal"), ("ne", "not_equal")),
    )
}
_OF_NUMPY = _COMPARISONS | {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}


def _elementwise(operation, call):
    """An operator, at once for operands of one common type and one shape, or of one number."""
    compares = operation in _COMPARISONS.values()

    def apply(self, other):
        scalar, kind = self.dtype, self.type
        if scalar.is_ptr() or scalar.name not in ("fp32", "int32", "int64"):
            return call(self, other)
        if type(other) is language.constexpr:
            other = other.value
        if type(other) is language.tensor:
            if other.dtype.is_ptr() or other.dtype.name != scalar.name:
                return call(self, other)
            if not kind.is_block():
                kind = other.type
            elif other.type.is_block() and other.type.of_numpy != kind.of_numpy:
                return call(self, other)
            other = other.handle.data
        elif not _fits(other, scalar.name):
            return call(self, other)
        found = interpreter.TensorHandle(operation(self.handle.data, other), scalar)
        return language.tensor(found, _bool_like(kind) if compares else kind)

    return apply


def _bool_like(kind):
    return language.block_type(language.int1, kind.shape) if kind.is_block() else language.int1


_block_types: dict = {}


def _make_known_block_type(self, element_ty, shape):
    # An operation makes several types, nearly always of sizes that were checked before.
    key = (element_ty.name, *shape)
    if key not in _block_types:
        _make_block_type(self, element_ty, shape)
        sizes = [language.constexpr(size) for size in self.shape]
        self.of_tensor = language.tuple(sizes), language.constexpr(self.numel)
        self.of_numpy = tuple(int(size.value) for size in sizes)
        _block_types[key] = self.__dict__
    self.__dict__ = _block_types[key]


_OF_SCALAR = language.tuple([]), language.constexpr(1)


def _make_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensor if type.is_block() else _OF_SCALAR


def _are_equal(self, other):
    # Of sizes: without a look for constants within.
    return self.values == list(other)


def _make_handle(self, data, dtype, attr=None):
    # Without a look whether numbers are wider than their type.
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


_NO_CONSTEXPR = (language.tensor, int, float, bool, type(None))


def _unwrap_if_needed(value):
    return value if type(value) in _NO_CONSTEXPR else _unwrap(value)


def _cast_other_types(self, value, dtype, fp_downcast_rounding=None):
    # A pointer's name is that of what it points to.
    ours, theirs = value.dtype, dtype.scalar
    if ours.name == theirs.name and not ours.is_ptr() and not theirs.is_ptr():
        return value
    return _cast(self, value, dtype, fp_downcast_rounding)


def _broadcast_other_shapes(self, lhs, rhs):
    ours, theirs = lhs.type, rhs.type
    if not ours.is_block():
        return (_splat(self, lhs, theirs) if theirs.is_block() else lhs), rhs
    if not theirs.is_block():
        return lhs, _splat(self, rhs, ours)
    return (lhs, rhs) if ours.of_numpy == theirs.of_numpy else _broadcast(self, lhs, rhs)


def _splat(self, scalar, block):
    """A scalar in every place of a block."""
    known = scalar.handle
    data = np.empty(block.of_numpy, known.data.dtype)
    data.fill(known.data.item())
    made = language.block_type(scalar.dtype, block.shape)
    return self.tensor(interpreter.TensorHandle(data, known.dtype.scalar), made)


def _operands_of_one_type(self, lhs, rhs, *rules):
    # Other operands are converted, or refused; of these, no rule changes the type.
    ours, theirs = (getattr(value, "dtype", None) for value in (lhs, rhs))
    if ours and theirs:
        if ours.name == theirs.name in ("fp32", "int32", "int64", "int1") and not ours.is_ptr():
            return _broadcast_other_shapes(self, lhs, rhs)
        # An offset of a pointer, where one may stand on the left.
        if rules[:1] == (True,) and ours.is_ptr() and theirs in (language.int32, language.int64):
            return _broadcast_other_shapes(self, lhs, rhs)
    elif len(rules) < 3:
        if ours and _fits(rhs, ours.name):
            return _broadcast_other_shapes(self, lhs, self.scalar_constant(rhs, ours))
        if theirs and _fits(lhs, theirs.name):
            return _broadcast_other_shapes(self, self.scalar_constant(lhs, theirs), rhs)
    return _operands(self, lhs, rhs, *rules)


def _reduce_slices(self, values):
    """Fold along the axis in its order, all places beside it at once."""
    assert not self.keep_dims
    values, axis = self.unravel(values, self.axis)
    slices = [np.moveaxis(value.handle.data, axis, 0) for value in values]
    total = None
    for row in zip(*slices, strict=True):
        one = [self.to_tensor(data, value.dtype) for data, value in zip(row, values, strict=True)]
        folded = one if total is None else self.combine_fn.fn(*total, *one)
        total = folded if isinstance(folded, (list, tuple)) else (folded,)
    found = [data.handle.data.reshape(slices[0].shape[1:]) for data in total]
    return [self.to_tensor(data, value.dtype) for data, value in zip(found, values, strict=True)]


def _fits(number, type_name: str) -> bool:
    """Whether a number takes the type of the tensor beside it."""
    if type_name == "fp32":
        return type(number) in (int, float)
    return type_name in ("int32", "int64") and type(number) is int and abs(number) < 2**31
