"""Compile the C kernels once per machine, compiler and source text."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sametoken.errors import UnsupportedError, in_words
from sametoken.io.cache_directory import (
    CACHE_VARIABLE,
    cache_directory,
    make_cache_directory,
    untrusted_reason,
)
from sametoken.io.child_process import temporary_directory
from sametoken.types.units import in_units

logger = logging.getLogger(__name__)

SOURCE_DIRECTORY = Path(__file__).parent
#: Bytes that a build takes at most, with the compiler's own files.
_ROOM = 1 << 22
#: Contraction is off, so that every rounding is explicit in the source (batch invariance).
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
    """One way to build; recipes are tried in order of speed.

    Attributes:
        borrows: OpenMP's symbols stay undefined, to be bound to the runtime that torch has loaded.
    """

    name: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()
    borrows: bool = False


def recipes_for(system: str, machine: str) -> tuple[Recipe, ...]:
    """The recipes of a system, as ``platform`` names it and its machine.

    Apple's compiler takes OpenMP as an argument of its front end alone, and names the processor
    otherwise than gcc; its linker asks to be told of symbols that stay undefined.
    """
    own = "-mcpu=native" if system == "Darwin" and machine == "arm64" else "-march=native"
    one_thread = (
        Recipe("one thread", (own,)),
        Recipe("one thread, generic instructions", ()),
    )
    if system == "Darwin":
        flags, link = (own, "-Xclang", "-fopenmp"), ("-undefined", "dynamic_lookup")
        return Recipe("torch's OpenMP", flags, link, borrows=True), *one_thread
    fast = (own, "-fopenmp")
    return (
        Recipe("torch's OpenMP", fast, borrows=True),
        Recipe("torch's OpenMP, without AMX", (*fast, "-mno-amx-bf16"), borrows=True),
        Recipe("its own OpenMP", fast, ("-fopenmp",)),
        *one_thread,
    )


RECIPES = recipes_for(platform.system(), platform.machine())


def find_compiler() -> tuple[str, ...]:
    """The C compiler's command: ``$CC``, cc, gcc or clang.

    Raises:
        UnsupportedError: there is none, or ``$CC`` is no command.
    """
    given = os.environ.get("CC", "")
    try:
        named = shlex.split(given)
    except ValueError as error:
        raise UnsupportedError(
            f"CC={given!r} is no command ({in_words(error)})", "correct it, or leave it out"
        ) from error
    candidates = [tuple(named)] if named else [("cc",), ("gcc",), ("clang",)]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    raise UnsupportedError(
        f"no C compiler found (looked for {', '.join(c[0] for c in candidates)})",
        "install gcc or clang, or point CC at one",
    )


def build(recipe: Recipe, compiler: Sequence[str]) -> Path:
    """The shared library for ``recipe``, compiled unless the cache has an intact one.

    Raises:
        UnsupportedError: the compiler or the cache directory failed, or other users may write to
            the directory, or its file system runs no code.
        ConfigError: the cache directory's home is unknown.
    """
    stem = f"kernels-{_fingerprint(recipe, compiler)}"
    try:
        directory = make_cache_directory()
        _require_own(directory)
        _require_executable(directory)
        if cached := _cached(directory, stem):
            return cached
        _require_room(directory)
        logger.info("compiling the CPU kernels (%s) into %s", recipe.name, directory)
        with temporary_directory(directory, ".build-") as scratch:
            finished = _compile(recipe, compiler, Path(scratch))
            finished.chmod(0o700)
            library = directory / f"{stem}-{_checksum(finished)}.so"
            # Concurrent builds replace the file with an equal one.
            os.replace(finished, library)
    except OSError as error:
        raise UnsupportedError(
            f"the CPU kernels could not be built in {cache_directory()} ({in_words(error)})",
            f"set {CACHE_VARIABLE} to a directory that can be written",
        ) from error
    return library


def _require_own(directory: Path) -> None:
    if why := untrusted_reason(directory.resolve()):
        raise UnsupportedError(
            f"CPU kernels are not loaded from {directory}: {why}",
            f"make it writable by you alone, or set {CACHE_VARIABLE} to another directory",
        )


def _require_executable(directory: Path) -> None:
    """Refuse a file system that no library can be loaded from, before minutes of compiling."""
    if os.statvfs(directory).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise UnsupportedError(
            f"CPU kernels cannot be loaded from {directory}: its file system is mounted noexec",
            f"set {CACHE_VARIABLE} to a directory of another file system",
        )


def _require_room(directory: Path) -> None:
    """Refuse a full file system, which each recipe would find after a minute of compiling."""
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    # Some network file systems tell no sizes.
    if found.f_blocks and free < _ROOM:
        raise UnsupportedError(
            f"CPU kernels take {in_units(_ROOM)} in {directory}, which has {in_units(free)} left",
            f"make room, or set {CACHE_VARIABLE} to a directory of another file system",
        )


def _cached(directory: Path, stem: str) -> Path | None:
    """An intact library built by this user; its name ends in its checksum."""
    for path in sorted(directory.glob(f"{stem}-*.so")):
        if why := untrusted_reason(path):
            logger.warning("%s is not loaded: %s", path, why)
        elif path.is_file() and path.stem == f"{stem}-{_checksum(path)}":
            return path
        else:
            logger.warning("%s is damaged and is built again", path)
    return None


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _sources() -> list[Path]:
    return sorted(SOURCE_DIRECTORY.glob("*.[ch]"))


def _compile(recipe: Recipe, compiler: Sequence[str], scratch: Path) -> Path:
    objects = {
        str(scratch / f"{source.stem}.o"): str(source)
        for source in _sources()
        if source.suffix == ".c"
    }
    with ThreadPoolExecutor() as pool:
        compiling = [
            pool.submit(
                _run,
                [*compiler, *FLAGS, *recipe.compile_flags, "-c", source, "-o", made],
                scratch,
            )
            for made, source in objects.items()
        ]
        for one in compiling:
            one.result()
    finished = scratch / "kernels.so"
    link = [*compiler, "-shared", *objects, *recipe.link_flags, "-lm", "-o", str(finished)]
    _run(link, scratch)
    return finished


def _run(command: list[str], scratch: Path) -> None:
    """Run the compiler, whose own files are in ``scratch`` too: elsewhere there may be no room."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        # Messages quote names of files, which may be no text.
        errors="replace",
        env=os.environ | {"TMPDIR": str(scratch)},
        check=False,
    )
    if done.returncode:
        raise UnsupportedError(
            f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}",
            "install a recent gcc or clang, or point CC at one",
        )


def _fingerprint(recipe: Recipe, compiler: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.name.encode() + source.read_bytes())
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    except OSError as error:
        raise UnsupportedError(
            f"{shlex.join(compiler)} cannot be run ({in_words(error)})",
            "install gcc or clang, or point CC at one",
        ) from error
    command = repr((list(compiler), FLAGS, recipe.compile_flags, recipe.link_flags))
    for part in (version, command.encode(), _cpu().encode()):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """The facts about the CPU that ``-march=native`` depends on."""
    parts = [platform.machine(), platform.processor()]
    information = Path("/proc/cpuinfo")
    if information.exists():
        wanted = ("model name", "flags", "Features", "CPU part")
        lines = information.read_text().split("\n\n")[0].splitlines()
        parts += [line for line in lines if line.startswith(wanted)]
    return "\n".join(parts)
