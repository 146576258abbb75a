"""Triton 3.6's interpreter, without what it does again at every call and every tensor.

Kernels compute what they compute without this, in half the time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from types import SimpleNamespace

from triton import language
from triton.runtime import interpreter

_patch_language = interpreter._patch_lang
_patch_tensor = interpreter._patch_lang_tensor


def install() -> None:
    """Change the interpreter of this process."""
    interpreter._patch_lang_tensor = _patch_tensor_for_numpy
    interpreter._patch_lang = _patch_language_for_a_launch
    interpreter.InterpretedFunction.__call__ = _call_device_function
    interpreter._get_np_dtype = _numpy_type
    language.tensor.__init__ = _make_tensor
    # Sums and products would be looked at for overflow, and what is found ignored without debug.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_tensor_for_numpy(tensor, scope):
    # Loop bounds are read by int() of a one-element array, which numpy 2.4 refuses.
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_language_for_a_launch(kernel):
    # Triton's own device functions name the language `core`.
    return _patch_language(SimpleNamespace(__globals__={"tl": language, "core": language.core}))


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


@cache
def _shape_and_size(shape):
    sizes = [language.constexpr(size) for size in shape]
    return language.tuple(sizes), language.constexpr(prod(shape))


def _make_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_and_size(type.shape if type.is_block() else ())
