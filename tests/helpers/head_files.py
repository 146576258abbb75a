"""A target and a draft head for it on disk, loaded as engines load them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from helpers.checkpoints import (
    eagle1_tensors,
    head_tensors,
    write_eagle1,
    write_llama,
    write_safeailab,
)
from helpers.drafting import CPU, MAX_LEN, Bench
from helpers.forward import load
from helpers.hybrids import FULL, write_hybrid
from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import Placement
from sametoken.drafters.build import load_drafter, needs_of_drafter
from sametoken.models.loader import read_config
from sametoken.ops.dispatch import select_backend
from sametoken.ops.reference import ReferenceKernels

BACKEND = replace(select_backend(CPU), model=ReferenceKernels())
PLACEMENT = Placement(BACKEND, torch.float32, CPU, max_model_len=40, max_positions=MAX_LEN)


class HeadFiles:
    """Both in a folder, the target loaded.

    Args:
        folder: for their files.
        which: "eagle", "eagle3", "mtp" or "mtp with experts".
        tensors: options of an EAGLE-3 head's.
    """

    def __init__(self, folder: Path, which: str, **tensors: Any) -> None:
        method = which.split()[0]
        model = None
        if method == "mtp":
            kind = "qwen3_5" if which == method else "qwen3_next"
            self.path = write_hybrid(folder / "target", kind, layer_types=[FULL] * 4)
        else:
            self.path = write_llama(folder / "target")
            if method == "eagle":
                model = str(write_eagle1(folder / "head", eagle1_tensors()))
            else:
                model = str(write_safeailab(folder / "head", head_tensors(**tensors)))
        self.spec = SpeculativeConfig(method, 3, model)
        config = read_config(self.path)
        needs = needs_of_drafter(self.spec, config, torch.float32, self.path)
        self.target = load(self.path, aux_layers=needs.aux_layers)

    def bench(self, kernels: ReferenceKernels | None = None, **changes: Any) -> Bench:
        """The drafter of the spec with these changes, which nothing spoils."""
        backend = replace(BACKEND, model=kernels or ReferenceKernels())
        placement = replace(PLACEMENT, backend=backend, target_path=self.path)
        loaded = load_drafter(replace(self.spec, **changes), self.target, placement)
        bench = Bench(self.target, 3, spoil=0.0)
        bench.drafter = loaded.attach(bench.allocate(loaded.caches), bench.coupling)
        return bench

    def head(self, kernels: ReferenceKernels | None = None, **changes: Any) -> Any:
        """That drafter's head."""
        return self.bench(kernels, **changes).drafter._head
