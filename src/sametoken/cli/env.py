"""``sametoken env``: the environment, for bug reports."""

from __future__ import annotations

import json
import platform
import shlex
import shutil
from pathlib import Path
from typing import Any

import typer

import sametoken
from sametoken.cli.options import AsJson
from sametoken.errors import UnsupportedError

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "typer", "rich")
_CPU_INFO = Path("/proc/cpuinfo")


def env(json_output: AsJson = False) -> None:
    """Show versions, hardware and the cache directory."""
    facts = _facts()
    if json_output:
        typer.echo(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {value}")


def _facts() -> dict[str, Any]:
    import torch

    from sametoken.bench.report import version_of
    from sametoken.config import EngineConfig
    from sametoken.engine.resolve import resolve_device
    from sametoken.io.cache_directory import cache_directory
    from sametoken.io.cores import num_usable_cores
    from sametoken.ops.dispatch import select_kernels

    device = resolve_device(EngineConfig())
    return {
        "sametoken": sametoken.__version__,
        "python": platform.python_version(),
        **{name: version_of(name) or "not installed" for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": num_usable_cores(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "cuda devices": torch.cuda.device_count(),
        "kernels": select_kernels(device).name,
        "compiler": _compiler(),
        "cache": str(cache_directory()),
    }


def _cpu_name() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _compiler() -> str:
    from sametoken.ops.native.build import find_compiler

    try:
        name, *arguments = find_compiler()
    except UnsupportedError:
        return "none"
    return shlex.join([shutil.which(name) or name, *arguments])
