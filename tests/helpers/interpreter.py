"""Triton's interpreter, without what it does again at every call and every tensor.

Kernels compute what they compute without this, in a third of the time.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_language = interpreter._patch_lang
_patch_tensor = interpreter._patch_lang_tensor
_broadcast = TritonSemantic.broadcast_impl_value
_cast = TritonSemantic.cast
_dot = interpreter.InterpreterBuilder.create_dot
_fma = interpreter.InterpreterBuilder.create_fma
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
    interpreter.InterpreterBuilder.create_dot = _dot_rounded_once
    interpreter.InterpreterBuilder.create_fma = _fma_rounded_once
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

    if target is language.tensor and name in _OF_NUMPY:
        call = _elementwise(name, call)
    elif target is language.tensor and name == "__getitem__":
        call = _with_new_axes(call)
    elif target in (language, language.core) and name in _AT_ONCE:
        call = partial(_AT_ONCE[name], call)
    scope.set_attr(target, name, call)


def _quotient(left, right):
    # As Triton has it: towards zero.
    return (left - np.fmod(left, right)) // right


_INTEGERS = ("int32", "int64", "uint32")
_NUMBERS = ("fp32", *_INTEGERS)
#: What numpy converts as a GPU does.
_PLAIN = ("int1", "int8", "uint8", *_NUMBERS)
_COMPARISONS = {
    f"__{name}__": (getattr(np, numpy_name), _NUMBERS)
    for name, numpy_name in (
        *(("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal")),
        *(("eq", "equal"), ("ne", "not_equal")),
    )
}
#: Operators, and the types of operands for which numpy's are the same.
_OF_NUMPY = _COMPARISONS | {
    **dict.fromkeys(("__add__", "__radd__"), (np.add, _NUMBERS)),
    **dict.fromkeys(("__mul__", "__rmul__"), (np.multiply, _NUMBERS)),
    "__sub__": (np.subtract, _NUMBERS),
    "__truediv__": (np.divide, ("fp32",)),
    "__floordiv__": (_quotient, ("int32", "int64")),
    "__mod__": (np.fmod, ("int32", "int64")),
    "__and__": (np.bitwise_and, ("int1", *_INTEGERS)),
    "__or__": (np.bitwise_or, ("int1", *_INTEGERS)),
    "__xor__": (np.bitwise_xor, ("int1", *_INTEGERS)),
    "__lshift__": (np.left_shift, _INTEGERS),
    "__rshift__": (np.right_shift, _INTEGERS),
}


def _elementwise(name, call):
    """An operator, at once for operands that it converts to a common type as numpy does."""
    (operation, types), compares = _OF_NUMPY[name], name in _COMPARISONS

    def apply(self, other):
        if type(other) is language.constexpr:
            other = other.value
        scalar = self.dtype
        if scalar.is_ptr():
            moved = operation is np.add and _moved(self, other)
            return moved or call(self, other)
        if scalar.name not in types:
            return call(self, other)
        is_block, data = self.type.is_block(), other
        if type(other) is language.tensor:
            scalar = _common_type(scalar, other.dtype)
            is_block, data = is_block or other.type.is_block(), other.handle.data
        elif not _fits(other, scalar.name):
            scalar = None
        if scalar is None:
            return call(self, other)
        found = operation(self.handle.data, data)
        return _made(found, language.int1 if compares else scalar, is_block)

    return apply


def _common_type(ours, theirs):
    """None if these are converted by other rules than numpy's."""
    if ours.is_ptr() or theirs.is_ptr():
        return None
    if ours.name == theirs.name:
        return ours
    return language.int64 if {ours.name, theirs.name} == {"int32", "int64"} else None


def _made(data, scalar, is_block):
    kind = language.block_type(scalar, list(data.shape)) if is_block else scalar
    return language.tensor(interpreter.TensorHandle(data, scalar), kind)


def _moved(pointer, offset):
    """A pointer plus an offset; None where that is neither a number nor a signed integer."""
    is_block = pointer.type.is_block()
    size = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
    if type(offset) is int:
        distance = np.uint64(size * offset % 2**64)
    elif type(offset) is language.tensor and offset.dtype in (language.int32, language.int64):
        is_block = is_block or offset.type.is_block()
        distance = size * offset.handle.data.astype(np.uint64)
    else:
        return None
    return _made(pointer.handle.data + distance, pointer.dtype, is_block)


def _with_new_axes(call):
    """An index, at once where it only adds axes of length 1."""

    def index(self, slices):
        all_ = slices if isinstance(slices, tuple) else (slices,)
        if not self.type.is_block() or any(one not in (None, slice(None)) for one in all_):
            return call(self, slices)
        return _made(self.handle.data[all_], self.dtype, is_block=True)

    return index


def _load(call, pointer, mask=None, other=None, **how):
    """A load of what lies at the pointers where the mask allows, zeros elsewhere."""
    mask, other = _unwrap_if_needed(mask), _unwrap_if_needed(other)
    if (
        type(pointer) is not language.tensor
        or not pointer.dtype.is_ptr()
        or pointer.dtype.element_ty.is_block()
        or pointer.dtype.element_ty.name == "int1"
        or not (mask is None or (type(mask) is language.tensor and mask.dtype.name == "int1"))
        or not (other is None or (type(other) in (int, float) and other == 0 and mask is not None))
        or not how.keys() <= {"cache_modifier", "eviction_policy", "volatile"}
    ):
        return call(pointer, mask, other, **how)
    addresses, element = pointer.handle.data, pointer.dtype.element_ty
    kind = _numpy_type(element)
    wanted = np.ones(addresses.shape, bool) if mask is None else mask.handle.data
    if wanted.shape != addresses.shape:
        if np.broadcast_shapes(addresses.shape, wanted.shape) != addresses.shape:
            return call(pointer, mask, other, **how)
        wanted = np.broadcast_to(wanted, addresses.shape)
    data = interpreter._interpreter.load(addresses, wanted, np.zeros(addresses.shape, kind), kind)
    return _made(data, element, pointer.type.is_block())


def _where(call, condition, x, y):
    """A choice between tensors, or a tensor and a number, of one type."""
    x, y = _unwrap_if_needed(x), _unwrap_if_needed(y)
    tensors = [one for one in (x, y) if type(one) is language.tensor]
    names = {None if one.dtype.is_ptr() else one.dtype.name for one in tensors}
    if (
        type(condition) is not language.tensor
        or condition.dtype.name != "int1"
        or len(names) != 1
        or not names <= set(_NUMBERS)
        or not all(type(one) is language.tensor or _fits(one, *names) for one in (x, y))
    ):
        return call(condition, x, y)
    choices = [one.handle.data if type(one) is language.tensor else one for one in (x, y)]
    is_block = any(one.type.is_block() for one in (condition, *tensors))
    return _made(np.where(condition.handle.data, *choices), tensors[0].dtype, is_block)


_AT_ONCE = {"load": _load, "where": _where}

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
    if ours.name in _PLAIN and theirs.name in _PLAIN and not ours.is_ptr() and not theirs.is_ptr():
        data = value.handle.data.astype(_numpy_type(theirs))
        return _made(data, theirs, value.type.is_block())
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
    found, shape = [], slices[0].shape[1:]
    for one, value in zip(total, values, strict=True):
        # A function may give a number in place of a tensor.
        data = one.handle.data.reshape(shape) if hasattr(one, "handle") else np.full(shape, one)
        found.append(self.to_tensor(data.astype(_numpy_type(value.dtype)), value.dtype))
    return found


def _dot_rounded_once(self, a, b, d, *how):
    """A product in doubles: of fp32, some processors' bits of a row follow its place."""
    if d.dtype.scalar != language.float32:
        return _dot(self, a, b, d, *how)
    left, right = (_widened(one) for one in (a, b))
    return interpreter.TensorHandle((left @ right).astype(np.float32) + d.data, language.float32)


def _fma_rounded_once(self, a, b, c):
    """As on a GPU, where a kernel says which sums round a product."""
    if c.dtype.scalar != language.float32:
        return _fma(self, a, b, c)
    found = a.data.astype(np.float64) * b.data + c.data
    return interpreter.TensorHandle(found.astype(np.float32), language.float32)


def _widened(matrix):
    data, scalar = matrix.data, matrix.dtype.scalar
    if scalar.is_fp8():
        data = interpreter._convert_float(data, scalar, language.float16, None).view(np.float16)
    return data.astype(np.float64)


def _fits(number, type_name: str) -> bool:
    """Whether a number takes the type of the tensor beside it."""
    if type_name == "fp32":
        return type(number) in (int, float)
    if type_name == "uint32":
        return type(number) is int and 0 <= number < 2**32
    return type_name in ("int32", "int64") and type(number) is int and abs(number) < 2**31
