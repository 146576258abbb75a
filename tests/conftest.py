"""One thread per test process, and Triton's interpreter where there is no GPU.

Both are set before torch and triton are imported.
"""

from __future__ import annotations

import os

# The suite runs several processes on few cores; spinning threads would fight over them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from triton.runtime import interpreter

from sametoken.kernels.gated_delta_rule import prepare

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor, scope):
    # Triton 3.6 reads loop bounds by int() of a one-element array, which numpy 2.4 refuses.
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_for_numpy

if not torch.cuda.is_available():
    # A program without a row takes as long as others there: few, each with several rows.
    prepare._PROGRAMS = 16
