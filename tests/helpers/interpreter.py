"""Triton 3.6's interpreter, without what it does again at every call and every tensor.

Kernels compute what they compute without this, in a third of the time.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_language = interpreter._patch_lang
_patch_tensor = interpreter._patch_lang_tensor
_broadcast = TritonSemantic.broadcast_impl_value
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

    scope.set_attr(target, name, call)


_block_types: dict = {}


def _make_known_block_type(self, element_ty, shape):
    # An operation makes several types, nearly always of sizes that were checked before.
    key = (element_ty.name, *shape)
    if key not in _block_types:
        _make_block_type(self, element_ty, shape)
        sizes = [language.constexpr(size) for size in self.shape]
        self.of_tensor = language.tuple(sizes), language.constexpr(self.numel)
        _block_types[key] = self.__dict__
    self.__dict__ = _block_types[key]


_OF_SCALAR = language.tuple([]), language.constexpr(1)


def _make_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensor if type.is_block() else _OF_SCALAR


def _are_equal(self, other):
    # Of sizes: without a look for constants within.
    return self.values == list(other)


def _broadcast_other_shapes(self, lhs, rhs):
    ours, theirs = (value.type.shape if value.type.is_block() else () for value in (lhs, rhs))
    return (lhs, rhs) if ours == theirs else _broadcast(self, lhs, rhs)


def _operands_of_one_type(self, lhs, rhs, *rules):
    # Other operands are converted, or refused; of these, no rule changes the type.
    ours, theirs = (getattr(value, "dtype", None) for value in (lhs, rhs))
    if ours and theirs:
        if ours.name == theirs.name in ("fp32", "int32", "int64", "int1"):
            return _broadcast_other_shapes(self, lhs, rhs)
    elif len(rules) < 3:
        if ours and _fits(rhs, ours.name):
            return _broadcast_other_shapes(self, lhs, self.scalar_constant(rhs, ours))
        if theirs and _fits(lhs, theirs.name):
            return _broadcast_other_shapes(self, self.scalar_constant(lhs, theirs), rhs)
    return _operands(self, lhs, rhs, *rules)


def _fits(number, type_name: str) -> bool:
    """Whether a number takes the type of the tensor beside it."""
    if type_name == "fp32":
        return type(number) in (int, float)
    return type_name in ("int32", "int64") and type(number) is int and abs(number) < 2**31
