"""Compile the C kernels once per machine, compiler and source text."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sametoken.errors import UnsupportedError

logger = logging.getLogger(__name__)

SOURCE_DIRECTORY = Path(__file__).parent
#: Contraction stays off so that every rounding is where the source has it (the row law).
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to build, tried in order of speed."""

    name: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()


_FAST = ("-march=native", "-fopenmp")
#: gcc 12 breaks off in this pass where vectors are 32 bytes wide (AVX2).
_WITHOUT_PRE = (*_FAST, "-fno-tree-pre")
#: The first leaves OpenMP's symbols open, to be bound to the runtime torch has loaded.
RECIPES = (
    Recipe("torch's OpenMP", _FAST),
    Recipe("its own OpenMP", _FAST, ("-fopenmp",)),
    Recipe("torch's OpenMP, one pass less", _WITHOUT_PRE),
    Recipe("its own OpenMP, one pass less", _WITHOUT_PRE, ("-fopenmp",)),
    Recipe("one thread", ("-march=native",)),
    Recipe("one thread, generic instructions", ()),
)


def find_compiler() -> tuple[str, ...]:
    """The C compiler's command: ``$CC``, cc, gcc or clang.

    Raises:
        UnsupportedError: there is none.
    """
    named = shlex.split(os.environ.get("CC", ""))
    candidates = [tuple(named)] if named else [("cc",), ("gcc",), ("clang",)]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    raise UnsupportedError(
        f"no C compiler found (looked for {', '.join(c[0] for c in candidates)})",
        "install gcc or clang, or point CC at one",
    )


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``$SAMETOKEN_CACHE`` or the user's cache."""
    if own := os.environ.get("SAMETOKEN_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "sametoken"


def build(recipe: Recipe, compiler: Sequence[str]) -> Path:
    """The shared library for ``recipe``, compiled unless the cache has it.

    Raises:
        UnsupportedError: the compiler or the cache directory failed.
    """
    library = cache_directory() / f"kernels-{_fingerprint(recipe, compiler)}.so"
    if library.exists():
        return library
    logger.info("compiling the CPU kernels (%s) into %s", recipe.name, library)
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            finished = _compile(recipe, compiler, Path(scratch))
            # Processes that build at the same time each replace the file by an equal one.
            os.replace(finished, library)
    except OSError as error:
        raise UnsupportedError(
            f"the CPU kernels could not be built in {library.parent}: {error}",
            "set SAMETOKEN_CACHE to a directory that can be written",
        ) from error
    return library


def _sources() -> list[Path]:
    return sorted(SOURCE_DIRECTORY.glob("*.[ch]"))


def _compile(recipe: Recipe, compiler: Sequence[str], scratch: Path) -> Path:
    objects = []
    for source in _sources():
        if source.suffix == ".c":
            target = scratch / f"{source.stem}.o"
            _run([*compiler, *FLAGS, *recipe.compile_flags, "-c", str(source), "-o", str(target)])
            objects.append(str(target))
    finished = scratch / "kernels.so"
    _run([*compiler, "-shared", *objects, *recipe.link_flags, "-lm", "-o", str(finished)])
    return finished


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(
            f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}",
            "install a recent gcc or clang, or point CC at one",
        )


def _fingerprint(recipe: Recipe, compiler: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    command = repr((list(compiler), FLAGS, recipe.compile_flags, recipe.link_flags))
    for part in (version, command.encode(), _cpu().encode()):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """What ``-march=native`` depends on."""
    parts = [platform.machine(), platform.processor()]
    information = Path("/proc/cpuinfo")
    if information.exists():
        wanted = ("model name", "flags", "Features", "CPU part")
        lines = information.read_text().split("\n\n")[0].splitlines()
        parts += [line for line in lines if line.startswith(wanted)]
    return "\n".join(parts)
