"""Building, caching, loading and falling back."""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sametoken.errors import ConfigError, UnsupportedError
from sametoken.ops.backend import AttentionShape
from sametoken.ops.dispatch import select_kernels
from sametoken.ops.native import library
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.native.build import (
    RECIPES,
    SOURCE_DIRECTORY,
    build,
    find_compiler,
    recipes_for,
)
from sametoken.ops.native.library import WeightMemory, load_library
from sametoken.ops.reference import ReferenceKernels

CPU = torch.device("cpu")


@pytest.fixture
def fresh_loader():
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMETOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def script(path: Path, text: str) -> tuple[str]:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return (str(path),)


def fake_compiler(path: Path, version: str = "1") -> tuple[str]:
    """Logs every call and writes an empty file where ``-o`` says."""
    return script(
        path,
        f'if [ "$1" = --version ]; then echo {version}; exit; fi\n'
        f'echo "$@" >> {path}.log\n'
        'while [ "$1" != -o ]; do shift; done; : > "$2"\n',
    )


def test_a_build_is_cached_by_sources_flags_and_compiler(cache, tmp_path):
    compiler = fake_compiler(tmp_path / "cc")
    log = tmp_path / "cc.log"
    built = build(RECIPES[0], compiler)
    calls = len(log.read_text().splitlines())
    assert calls == len([*SOURCE_DIRECTORY.glob("*.c")]) + 1  # and the link
    assert build(RECIPES[0], compiler) == built
    assert len(log.read_text().splitlines()) == calls
    others = {build(RECIPES[1], compiler), build(RECIPES[0], fake_compiler(tmp_path / "cc", "2"))}
    assert len(others | {built}) == 3
    assert sorted(cache.iterdir()) == sorted(others | {built})


def test_a_failing_compiler_is_quoted(cache, tmp_path):
    compiler = script(tmp_path / "cc", "echo no space left >&2; exit 1\n")
    with pytest.raises(UnsupportedError, match="no space left"):
        build(RECIPES[0], compiler)
    assert list(cache.iterdir()) == []


def test_a_message_in_another_encoding_is_quoted(cache, tmp_path):
    compiler = script(tmp_path / "cc", r"printf 'caf\351: no space left' >&2; exit 1")
    with pytest.raises(UnsupportedError, match="caf\ufffd: no space left"):
        build(RECIPES[0], compiler)


def test_the_compiler_s_own_files_are_in_the_cache_too(cache, tmp_path, monkeypatch):
    """Elsewhere there may be no room, or nothing may be written."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    compiler = script(tmp_path / "cc", f"echo $TMPDIR >> {tmp_path}/places; exit 1\n")
    with pytest.raises(UnsupportedError):
        build(RECIPES[0], compiler)
    (place,) = set((tmp_path / "places").read_text().splitlines()[1:])
    assert Path(place).parent == cache


BUILD = """
import sys, threading
from sametoken.io.child_process import Inbox, take_socket
from sametoken.ops.native.build import RECIPES, build

threading.Thread(target=Inbox(take_socket(int(sys.argv[1]))).read_first, daemon=True).start()
build(RECIPES[0], sys.argv[2:])
"""


def test_a_process_whose_parent_ends_meanwhile_leaves_nothing(cache, tmp_path):
    """As an engine of a server that is ended while it starts for the first time."""
    called = tmp_path / "called"
    # One that begins as its parent ends would wait for process 1.
    waiting = f"touch {called}; while kill -0 $PPID && [ $PPID != 1 ]; do sleep 0.05; done\n"
    compiler = script(tmp_path / "cc", "[ $1 = --version ] && exit\n" + waiting)
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", BUILD, str(theirs.fileno()), *compiler],
            pass_fds=(theirs.fileno(),),
        )
    with process:
        while not called.exists():
            assert process.poll() is None
            time.sleep(0.01)
        ours.close()
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAMETOKEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        UnsupportedError, match=r"\((not a directory|file exists)\)\. Set SAMETOKEN_CACHE"
    ):
        build(RECIPES[0], fake_compiler(tmp_path / "cc"))


def test_a_cache_that_runs_no_code_is_named_before_anything_is_compiled(
    cache, tmp_path, monkeypatch
):
    compiler = fake_compiler(tmp_path / "cc")
    found = SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    with pytest.raises(UnsupportedError, match=r"noexec\. Set SAMETOKEN_CACHE"):
        build(RECIPES[0], compiler)
    assert not (tmp_path / "cc.log").exists()


def test_a_full_cache_is_named_before_anything_is_compiled(cache, tmp_path, monkeypatch):
    compiler = fake_compiler(tmp_path / "cc")
    found = SimpleNamespace(f_flag=0, f_blocks=4096, f_bavail=100, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    with pytest.raises(UnsupportedError, match=r"which has 400.0 KiB left\. Make room"):
        build(RECIPES[0], compiler)
    assert not (tmp_path / "cc.log").exists()


def test_the_compiler_may_carry_arguments(monkeypatch, tmp_path):
    (command,) = script(tmp_path / "my cc", "exit 0\n")
    monkeypatch.setenv("CC", f"'{command}' -m64")
    assert find_compiler() == (command, "-m64")


@pytest.mark.usefixtures("fresh_loader")
def test_without_a_compiler_the_reference_serves_and_says_so(monkeypatch, caplog):
    monkeypatch.delenv("SAMETOKEN_KERNELS", raising=False)
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with caplog.at_level(logging.WARNING):
        kernels = select_kernels(CPU)
    assert kernels.name == "reference"
    assert "/nonexistent/cc" in caplog.text
    assert "slower" in caplog.text


@pytest.mark.usefixtures("fresh_loader")
@pytest.mark.parametrize(
    ("named", "why"), [("cc '", "No closing quotation"), ("{}", "exec format error")]
)
def test_the_reference_serves_beside_a_compiler_that_is_no_program(
    cache, tmp_path, monkeypatch, caplog, named, why
):
    monkeypatch.delenv("SAMETOKEN_KERNELS", raising=False)
    text = tmp_path / "cc"
    text.write_text("no program\n")
    text.chmod(0o755)
    monkeypatch.setenv("CC", named.format(text))
    with caplog.at_level(logging.WARNING):
        assert select_kernels(CPU).name == "reference"
    assert f"({why})" in caplog.text


@pytest.mark.usefixtures("fresh_loader")
def test_native_on_demand_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("SAMETOKEN_KERNELS", "native")
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(UnsupportedError, match="no C compiler"):
        select_kernels(CPU)


@pytest.mark.parametrize("choice", ["native", "reference"])
def test_the_environment_names_a_bundle(monkeypatch, choice):
    monkeypatch.setenv("SAMETOKEN_KERNELS", choice)
    assert select_kernels(CPU).name == choice


def test_native_is_the_default(monkeypatch):
    monkeypatch.delenv("SAMETOKEN_KERNELS", raising=False)
    assert select_kernels(CPU).name == "native"


def test_an_unknown_bundle_is_refused(monkeypatch):
    monkeypatch.setenv("SAMETOKEN_KERNELS", "fast")
    with pytest.raises(ConfigError, match="SAMETOKEN_KERNELS='fast'"):
        select_kernels(CPU)


ONE_RUNTIME = """
import re, torch
from pathlib import Path
from sametoken.ops.native.library import load_library
library = load_library()
maps = Path("/proc/self/maps").read_text()
assert len(set(re.findall(r"/\\S*/lib(?:gomp|iomp5|omp)[-.]\\S*", maps))) == 1, maps
for threads in (1, 2):
    torch.set_num_threads(threads)
    assert library.team_size() == threads
"""


def test_torch_governs_the_one_openmp_runtime():
    """In a process of its own: other tests load libraries that bring runtimes along."""
    subprocess.run([sys.executable, "-c", ONE_RUNTIME], check=True)


@pytest.mark.usefixtures("fresh_loader", "cache")
def test_without_openmp_and_vector_extensions_the_kernels_still_work(
    monkeypatch, tmp_path, make_scene, caplog
):
    """A compiler that refuses both leads to the last recipe: portable C on one thread."""
    compiler = os.environ.get("CC", "cc")
    refusal = 'case "$*" in *-fopenmp*|*-march=native*) echo refused >&2; exit 1;; esac\n'
    # Optimization takes most of a compiler's time and is not what is looked at.
    (command,) = script(tmp_path / "plain", refusal + f'exec {compiler} "$@" -O0\n')
    monkeypatch.setenv("CC", command)
    with caplog.at_level(logging.WARNING):
        portable, reference = NativeKernels(load_library()), ReferenceKernels()
    assert re.search(r"the CPU kernels use one thread, generic .* since .*refused", caplog.text)
    assert load_library().team_size() == 1
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.bfloat16, 2**-7), (torch.float32, 1e-5)):
        x = torch.randn(7, 99, generator=generator).to(dtype)
        weight = torch.randn(40, 99, generator=generator).to(dtype) / 10
        found = portable.pack(weight).matmul(x)
        wanted = reference.pack(weight).matmul(x)
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        assert torch.equal(portable.pack(weight).matmul(x[:1])[0], found[0])
        history = torch.randn(2, 1, 300, 2, 24, generator=generator).to(dtype)
        shape = AttentionShape(6, 2, 24)
        scene = make_scene(shape, history, [300], 16, 0)
        rows, q = scene.rows([0] * 7, range(290, 297)), history[0, 0, :21].view(7, 6, 24)
        found = portable.attention(q, shape, rows, scene.kv)
        wanted = reference.attention(q, shape, rows, scene.kv)
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    inputs = (
        torch.arange(4995.0).view(5, 999) % 7,
        torch.ones(5),
        torch.arange(5),
        torch.arange(5),
    )
    assert torch.equal(portable.sample(*inputs), reference.sample(*inputs))


def test_matrix_units_that_the_system_refuses_are_not_used(monkeypatch):
    typed = library._typed

    def refused(loaded, name, hint):
        return (lambda: 0) if name == "may_use_amx" else typed(loaded, name, hint)

    built = build(RECIPES[0], find_compiler())
    monkeypatch.setattr(library, "_typed", refused)
    with pytest.raises(UnsupportedError, match="lets no process use the matrix units"):
        library._opened(RECIPES[0], built)
    if platform.machine() == "x86_64":
        command = (*find_compiler(), *RECIPES[1].compile_flags, "-dM", "-E", "-x", "c", "/dev/null")
        macros = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "__AVX2__" in macros
        assert "__AMX_BF16__" not in macros


def test_apple_s_compiler_is_asked_in_its_own_way():
    """It knows neither ``-fopenmp`` nor omp.h, and for ARM no ``-march=native``."""
    fast, *others = recipes_for("Darwin", "arm64")
    assert fast.borrows
    assert fast.compile_flags == ("-mcpu=native", "-Xclang", "-fopenmp")
    assert fast.link_flags == ("-undefined", "dynamic_lookup")
    assert [one.compile_flags for one in others] == [("-mcpu=native",), ()]
    assert recipes_for("Darwin", "x86_64")[0].compile_flags[0] == "-march=native"
    assert not any("-undefined" in one.link_flags for one in recipes_for("Linux", "aarch64"))
    sources = [path.read_text() for path in SOURCE_DIRECTORY.glob("*.[ch]")]
    assert len(sources) > 20
    assert not any("#include <omp.h>" in text for text in sources)


def test_weights_share_slabs_without_overlap():
    advised = []
    memory = WeightMemory(lambda address, size: advised.append((address, size)), slab_bytes=1000)
    taken = [memory.take(size) for size in (65, 200, 1, 500, 3000, 10)]
    assert [t.numel() for t in taken] == [65, 200, 1, 500, 3000, 10]
    for index, weight in enumerate(taken):
        weight.fill_(index)
    assert all((weight == index).all() for index, weight in enumerate(taken))
    assert all(t.data_ptr() % 64 == 0 for t in taken)
    assert [size for _, size in advised] == [1000, 3000, 1000]
