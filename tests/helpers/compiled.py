"""Launches compiled for a GPU that is not there; nothing runs.

The interpreter takes every argument as a number. The compiler makes an argument of 1 a
constant, so what is right in the one need not compile in the other.
"""

from __future__ import annotations

import os
import subprocess
import sys

_PRETEND = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

run = JITFunction.run

def compiled(self, *args, grid, warmup, **options):
    assert 0 < grid[0] < 2**31 and all(0 < size < 2**16 for size in grid[1:]), grid
    return run(self, *args, grid=grid, warmup=True, **options)

driver.set_active(Driver())
JITFunction.run = compiled
"""


def compile_launches(code: str, cache) -> None:
    """Run code, in a process of its own, that calls host wrappers of kernels on CPU tensors.

    Fails if a kernel does not compile, or if no GPU has room for its programs.

    Args:
        code: may use torch.
        cache: a folder for what is compiled.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-c", _PRETEND + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
