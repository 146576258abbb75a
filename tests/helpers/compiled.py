"""Launches for a GPU that is not there, compiled or noted; nothing runs.

The interpreter takes every argument as a number. The compiler makes an argument of 1 a
constant, so what is right in the one need not compile in the other.
"""

from __future__ import annotations

import ast
import atexit
import json
import os
import re
import subprocess
import sys
from functools import lru_cache

from helpers.machine_code import overwritten_operands

#: A product whose left operand is in registers, and one that Triton does not wait for.
_LEFT_IN_REGISTERS = re.compile(r"warp_group_dot %.*: tensor<")
_LEFT_AND_PENDING = re.compile(r"warp_group_dot %.*: tensor<.*\n.*dot_wait .*pendings = [1-9]")

#: The axis, operations, shape and layout of what a kernel reduces; its layouts.
_REDUCED = re.compile(
    r'"tt.reduce"\(.*?axis = (\d+).*?\(\{(.*?)\}\) : \(tensor<([\dx]+)x\w+, (#\w+)>', re.S
)
_LAYOUT = re.compile(r"^(#\w+) = #ttg.(?:blocked|linear|nvidia_mma)<\{(.*)\}>$", re.M)
_PARTS_OF_LAYOUT = re.compile(r"(\w+) = (\[[\[\]\d, ]*\])")

#: Imports what every piece of code imports, and compiles something, once: what a compilation
#: finds out about the compiler serves the forks, in each of which one piece of code runs.
_SERVER = """
import gc, json, os, sys, tempfile, traceback
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    capability = 90

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

# KiB of shared memory that a program can have.
MEMORY = {75: 64, 80: 163, 89: 99, 90: 227, 120: 99}
run = JITFunction.run

def compiled(self, *args, grid, warmup, **options):
    assert 0 < grid[0] < 2**31 and all(0 < size < 2**16 for size in grid[1:]), grid
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    assert kernel.metadata.shared <= MEMORY[Driver.capability] << 10, kernel.metadata
    return kernel

driver.set_active(Driver())
JITFunction.run = compiled
import sametoken.ops.triton
from sametoken.ops.model import activation_triton

with tempfile.TemporaryDirectory() as cache:
    os.environ["TRITON_CACHE_DIR"] = cache
    activation_triton.relu_squared(torch.zeros(1, 64, dtype=torch.bfloat16))

# A search for garbage would write to every page that a fork shares with this process.
gc.freeze()
gc.disable()
for line in sys.stdin:
    code, cache, errors, Driver.capability = json.loads(line)
    if child := os.fork():
        print(os.waitpid(child, 0)[1], flush=True)
        continue
    status = 1
    try:
        os.environ["TRITON_CACHE_DIR"] = cache
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        exec(code, {"torch": torch, "memory": MEMORY[Driver.capability] << 10})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
"""


@lru_cache
def _server() -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _SERVER]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    atexit.register(process.communicate)
    return process


def compile_launches(code: str, cache, capability: int = 90) -> None:
    """Run code, in a process of its own, that calls host wrappers of kernels on CPU tensors.

    Fails if a kernel does not compile, if no GPU has room for its programs, or if it writes
    registers that products still read.

    Args:
        code: may use torch, and ``memory``, the bytes of shared memory of a program.
        cache: a folder for what is compiled.
        capability: of the GPU, 10 times the major and the minor.
    """
    server, errors = _server(), cache / "errors.txt"
    server.stdin.write(json.dumps([code, str(cache), str(errors), capability]) + "\n")
    server.stdin.flush()
    assert server.stdout.readline() == "0\n", errors.read_text()[-2000:]
    left_in_registers = []
    for path in cache.rglob("*.ttgir"):
        compiled = path.read_text()
        if _LEFT_IN_REGISTERS.search(compiled):
            # Gluon names the registers that a wait keeps.
            assert "warp_specialize" in compiled or not _LEFT_AND_PENDING.search(compiled), (
                path.stem
            )
            left_in_registers.append(path.with_suffix(".cubin"))
    overwritten = overwritten_operands(left_in_registers) if left_in_registers else []
    assert not overwritten, overwritten


def orders_of_sums(cache, kernel: str) -> list[set]:
    """Of each compilation of a kernel in this folder, in which order its sums add numbers.

    A sum's order is three tuples: steps along it from a number to one in another register, lane and
    warp. Numbers in registers are added first, in the order of these steps, warps last.
    """
    return [_orders(path.read_text()) for path in cache.rglob(f"{kernel}.ttgir")]


def _orders(code: str) -> set[tuple[tuple[int, ...], ...]]:
    layouts, found = dict(_LAYOUT.findall(code)), set()
    for axis, operations, shape, layout in _REDUCED.findall(code):
        if "arith.addf" in operations or "math.fma" in operations:
            size = int(shape.split("x")[int(axis)])
            found.add(_steps(layouts[layout], int(axis), size))
    return found


def _steps(layout: str, axis: int, size: int) -> tuple[tuple[int, ...], ...]:
    parts = {name: ast.literal_eval(part) for name, part in _PARTS_OF_LAYOUT.findall(layout)}
    if "register" in parts:
        own = (parts[name] for name in ("register", "lane", "warp"))
        return tuple(tuple(step[axis] for step in steps if step[axis]) for steps in own)
    if "instrShape" in parts:
        # Four threads have a row of a product (wgmma): of each eight columns two neighbours each.
        assert axis == 1
        eights = (8 << place for place in range((size // 8 - 1).bit_length()))
        return (1, *eights), (2, 4), ()
    registers, lanes, warps = steps = ([], [], [])
    step = 1
    for own, name in zip(steps, ("sizePerThread", "threadsPerWarp", "warpsPerCTA"), strict=True):
        end = min(step * parts[name][axis], size)
        while step < end:
            own.append(step)
            step *= 2
    while step < size:
        registers.append(step)
        step *= 2
    return tuple(registers), tuple(lanes), tuple(warps)


def unused_barriers(cache) -> list[str]:
    """Barriers in shared memory of the kernels in this folder that nothing waits for.

    The compiler gives their memory to others, whose values there change when the driver interrupts
    a program to let another process run.
    """
    found = []
    for path in cache.rglob("*.ttgir"):
        code = path.read_text()
        for name in re.findall(r"(%\w+) = ttg\.local_alloc : .*x1xi64", code):
            uses = re.findall(rf"^.*{name}\b.*$", code, re.MULTILINE)
            if not any("warp_specialize" in use for use in uses):
                found.append(f"{path.stem}: {name}")
    return found


class Launched:
    """In place of a kernel: notes whether it may start before the kernel ahead of it has ended."""

    def __init__(self):
        self.early = []

    def __getitem__(self, grid):
        return lambda *arguments, launch_pdl, **constants: self.early.append(launch_pdl)
