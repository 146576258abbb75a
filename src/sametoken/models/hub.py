"""Checkpoints of the Hugging Face hub: found in its cache, else downloaded into it.

``huggingface_hub`` names the cache and the hub by its own variables (``HF_HOME``,
``HF_HUB_CACHE``, ``HF_ENDPOINT``, ``HF_TOKEN``), and is imported when a hub id is used.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from sametoken.config import DUMMY
from sametoken.errors import CheckpointError, SametokenError, clipped, in_words
from sametoken.io.terminal import stderr_is_terminal
from sametoken.models.load.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX,
    INDEX_PICKLED,
    QUANTIZATION_FILES,
    SINGLE,
    choose_adapter_weights,
    choose_weights,
    weight_files,
)
from sametoken.models.load.gguf_names import has_all_parts, models_of
from sametoken.types.units import in_units

CONFIG = "config.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_SETTINGS = (
    CONFIG,
    "generation_config.json",
    *_TOKENIZER,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    *QUANTIZATION_FILES,
)
#: Vocabularies, for repositories without tokenizer.json.
_VOCABULARIES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")
_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?", re.ASCII)
_FILES = (".gguf", ".json", ".safetensors")
_CANNOT_STORE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
_MAX_REASON = 160


class Needed(Enum):
    """What a caller reads of a checkpoint; other files are not downloaded."""

    MODEL = "a model's config, tokenizer and weights"
    HEAD = "the config and weights of a draft head"
    CONFIG = "a model's config and tokenizer"
    TOKENIZER = "a tokenizer"
    ADAPTER = "the config and weights of an adapter"

    @classmethod
    def of(cls, load_format: str, *, head: bool = False) -> Needed:
        """What loading in this format reads: no weights for dummy ones."""
        if load_format == DUMMY:
            return cls.CONFIG
        return cls.HEAD if head else cls.MODEL


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of models, ``org/name``, at a branch, tag or commit."""

    repository: str
    revision: str = "main"

    @classmethod
    def parse(cls, name: str) -> HubId | None:
        """Parse ``org/name[@revision]``; None for what can only be a path."""
        match = _ID.fullmatch(name)
        if match is None or name.lower().endswith(_FILES):
            return None
        return cls(match["repository"], match["revision"] or "main")

    def __str__(self) -> str:
        return self.repository + ("" if self.revision == "main" else f"@{self.revision}")

    @property
    def command(self) -> str:
        """The command that downloads it."""
        revision = "" if self.revision == "main" else f" --revision {self.revision}"
        return f"hf download {self.repository}{revision}"


def find_on_hub(
    hub_id: HubId,
    needed: Needed,
    announce: Callable[[str], None],
    hint: Callable[[], str],
    check: Callable[[Path], object] = lambda folder: None,
) -> Path:
    """The directory of a repository's files, or the path of its GGUF model's first file.

    What the cache holds is used without asking the hub, so a branch stays where it was when it
    was downloaded.

    Args:
        hub_id: the repository.
        needed: which files.
        announce: called with a sentence on what is used or downloaded.
        hint: makes a sentence for the error if there is no such repository.
        check: refuses a model by a directory of its small files, before its weights come.

    Raises:
        CheckpointError: the repository or the needed files do not exist, or cannot be had.
        UnsupportedError: the model is not supported; its weights are not downloaded.
    """
    found = cached_on_hub(hub_id, needed)
    if found is not None:
        announce(f"using {hub_id} from {found}")
        return found
    with _errors(hub_id, hint):
        return _download(hub_id, needed, announce, check)


def cached_repositories() -> list[str]:
    """Ids of the models in the cache."""
    from huggingface_hub import constants

    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*"))
    return [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]


def model_name(path: Path) -> str:
    """The name of a model's directory or file, in the cache that of its repository."""
    repository = path.parent.parent.name
    is_cached = path.parent.name == "snapshots" and repository.startswith("models--")
    return repository.rpartition("--")[2] if is_cached else path.name


def cached_on_hub(hub_id: HubId, needed: Needed = Needed.MODEL) -> Path | None:
    """What is needed of the cached snapshot, if all of it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            hub_id.repository,
            revision=hub_id.revision,
            local_files_only=True,
            allow_patterns=[ADAPTER_CONFIG if needed is Needed.ADAPTER else CONFIG],
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return _complete(Path(folder), needed)


def _complete(folder: Path, needed: Needed) -> Path | None:
    """The folder, or its GGUF model's first file, unless something that is needed is missing."""
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    models = _gguf_models(names, needed)
    if models:
        return folder / models[0][0] if len(models) == 1 and has_all_parts(models[0]) else None
    if needed is Needed.TOKENIZER:
        is_whole = any(name in names for name in _TOKENIZER)
    elif needed is Needed.ADAPTER:
        is_whole = ADAPTER_CONFIG in names and any(name in names for name in ADAPTER_WEIGHTS)
    else:
        is_whole = CONFIG in names and (needed is Needed.CONFIG or _has_weights(folder))
    return folder if is_whole else None


def _has_weights(folder: Path) -> bool:
    try:
        return all(file.is_file() for file in weight_files(folder))
    except SametokenError:
        return False


def _download(
    hub_id: HubId,
    needed: Needed,
    announce: Callable[[str], None],
    check: Callable[[Path], object],
) -> Path:
    from huggingface_hub import HfApi, constants

    # These import torch, which the command's help does without.
    from sametoken.models.load.adapter import read_adapter_config
    from sametoken.models.load.gguf_architectures import require_architecture
    from sametoken.models.loader import read_config

    info = HfApi().model_info(hub_id.repository, revision=hub_id.revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    announce(f"fetching {hub_id} from {constants.ENDPOINT} into {constants.HF_HUB_CACHE}")
    begun = time.monotonic()
    models = _gguf_models(sizes, needed)
    if models:
        names = _the_only(hub_id, models)
        # All that the hub tells of the file's header.
        architecture = (info.gguf or {}).get("architecture")
        if needed is Needed.MODEL and architecture is not None:
            require_architecture(architecture, hub_id)
        found = _fetch(hub_id, names) / names[0]
    elif needed is Needed.ADAPTER:
        names = [ADAPTER_CONFIG, choose_adapter_weights(sizes, hub_id)]
        read_adapter_config(_fetch(hub_id, names[:1]))
        found = _fetch(hub_id, names)
    else:
        names = _settings(sizes)
        found = _fetch(hub_id, names)
        if needed is Needed.MODEL:
            # Refuses a model that is not supported before its weights come.
            read_config(found)
            check(found)
        if needed in (Needed.MODEL, Needed.HEAD):
            # An index is there already.
            own = [name for name in sizes if "/" not in name]
            weights = choose_weights(own, hub_id, found.joinpath)
            found = _fetch(hub_id, weights)
            names += weights
    fetched = in_units(sum(sizes.get(name, 0) for name in names))
    announce(f"fetched {fetched} in {time.monotonic() - begun:.1f} s")
    return found


def _settings(names: Collection[str]) -> list[str]:
    """The small files among a repository's: configs, tokenizer, templates, index."""
    wanted = {*_SETTINGS}
    if _TOKENIZER[0] not in names:
        wanted |= {*_VOCABULARIES}
    if INDEX in names or SINGLE not in names:
        wanted |= {INDEX} if INDEX in names else {INDEX_PICKLED}
    return [name for name in names if name in wanted or _TEMPLATES.fullmatch(name)]


def _gguf_models(names: Collection[str], needed: Needed) -> list[list[str]]:
    """GGUF files by model where no safetensors are; they hold config and tokenizer too."""
    if needed in (Needed.HEAD, Needed.ADAPTER) or any(
        name.endswith(".safetensors") for name in names
    ):
        return []
    return models_of(name for name in names if name.lower().endswith(".gguf"))


def _the_only(hub_id: HubId, models: list[list[str]]) -> list[str]:
    if len(models) > 1:
        found = ", ".join(files[0] for files in models)
        raise CheckpointError(
            f"{hub_id} holds {len(models)} GGUF models: {clipped(found, 400)}",
            f"run `{hub_id.command} FILE` for one of them, with all its files if it is split, and "
            "give the path of the first",
        )
    return models[0]


def _fetch(hub_id: HubId, names: list[str]) -> Path:
    """Download files into the cache; bars on stderr where it is a terminal."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    if not names:
        raise CheckpointError(f"{hub_id} holds no files of a model", "give another repository")
    bars: list[Bar] = []

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            # The client's own bar of all files shows in pipes and files too.
            shown = {"disable": not stderr_is_terminal(), "leave": False}
            super().__init__(*arguments, **options | shown)
            bars.append(self)

    try:
        folder = snapshot_download(
            hub_id.repository, revision=hub_id.revision, allow_patterns=names, tqdm_class=Bar
        )
    finally:
        # The client leaves some open, which would be drawn again at the process's end.
        for bar in reversed(bars):
            bar.close()
    return Path(folder)


@contextmanager
def _errors(hub_id: HubId, hint: Callable[[], str]) -> Iterator[None]:
    """Turn the hub's errors into one sentence each, with a remedy."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page, cache = f"{constants.ENDPOINT}/{hub_id.repository}", constants.HF_HUB_CACHE
    try:
        yield
    except SametokenError:
        raise
    except GatedRepoError as error:
        raise CheckpointError(
            f"{hub_id} is gated", f"accept its terms at {page}, then run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"{str(hub_id)!r} is neither a path nor a repository of {constants.ENDPOINT}",
            hint() + "check the spelling; if it is private, run `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{hub_id.repository} has no revision {hub_id.revision!r}",
            f"give a branch, tag or commit listed at {page}",
        ) from error
    except Exception as error:
        # Versions of huggingface_hub use different HTTP libraries, each with errors of its own.
        if isinstance(error, OSError) and error.errno in _CANNOT_STORE:
            raise CheckpointError(
                f"{hub_id} cannot be stored in {cache} ({in_words(error)})",
                "set HF_HOME to a directory that has the room",
            ) from error
        raise CheckpointError(
            f"{str(hub_id)!r} is no path, the cache {cache} does not hold all of it, and it cannot "
            f"be downloaded ({_reason(error)})",
            hint() + f"run `{hub_id.command}` on a machine with network, and copy its cache to "
            f"{cache}, or set HF_HOME to the copy",
        ) from error


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    first_line = str(error).strip().partition("\n")[0]
    return clipped(f"{type(error).__name__}: {first_line}", _MAX_REASON)
