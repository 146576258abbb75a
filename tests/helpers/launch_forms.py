"""What launches of Triton and Gluon kernels are compiled for, over tensors without memory.

On the meta device a step computes nothing, so that steps of real sizes take milliseconds; each
launch is noted in place of being run.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from helpers.scripts import imported
from sametoken.config import DUMMY
from sametoken.drafters.base import Placement
from sametoken.drafters.build import load_drafter, needs_of_drafter
from sametoken.drafters.combined import share_drafter
from sametoken.drafters.context import Coupling
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.models.load.dummy import dummy_reader
from sametoken.models.load.quantization import read_quantization
from sametoken.models.loader import read_config
from sametoken.models.registry import model_class
from sametoken.ops import hopper, pdl
from sametoken.ops.cache_types import stored_in
from sametoken.ops.dispatch import Backend
from sametoken.ops.lookup import ngram, suffix
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.step import triton as step_ops
from sametoken.ops.step.types import NUM_COUNTS, LayoutTable
from sametoken.ops.triton import TritonKernels
from sametoken.runner.step import Step
from sametoken.state.caches import ModelCache
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.types.layout import TABLE_ROWS, StepShape
from sametoken.types.speculative_config import SpeculativeConfig
from sametoken.types.speculative_methods import HEADS

META = torch.device("meta")
Form = tuple[str, tuple]


@contextmanager
def recorded() -> Iterator[set[Form]]:
    """Within, launches run nothing and are noted, as those of a Hopper GPU."""
    forms: set[Form] = set()
    facts = {hopper.is_hopper: lambda device: True, pdl.supports_pdl: lambda tensor: True}
    with pytest.MonkeyPatch.context() as patch:
        # Others have none, and some of transformers are imported by a look.
        ours = [module for name, module in sys.modules.items() if name.startswith("sametoken.")]
        for module in ours:
            for name in ("is_hopper", "supports_pdl"):
                found = getattr(module, name, None)
                if found in facts:
                    patch.setattr(module, name, facts[found])
        # torch makes these of the meta device in Python, ten times slower.
        patch.setattr(torch.Tensor, "new_empty", _new_empty)
        patch.setattr(torch, "empty_like", _empty_like)
        for kind in (InterpretedFunction, JITFunction):
            patch.setattr(
                kind, "run", lambda kernel, *args, **given: forms.add(_form(kernel, args, given))
            )
        yield forms


def _new_empty(self: torch.Tensor, *size, dtype=None, device=None) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype or self.dtype, device=device or self.device)


def _empty_like(other: torch.Tensor, *, dtype=None) -> torch.Tensor:
    size, strides = other.size(), other.stride()
    return torch.empty_strided(size, strides, dtype=dtype or other.dtype, device=META)


def _form(kernel, args, given) -> Form:
    """A kernel and all that it is compiled for: constants, types, and what numbers allow."""
    constant = _parameters(kernel.fn)
    of_kernel = vars(kernel) if isinstance(kernel, JITFunction) else kernel.kwargs
    free = of_kernel.get("do_not_specialize") or ()
    bound = dict(zip(constant, args, strict=False)) | given
    del bound["grid"], bound["warmup"]
    parts = [
        (name, repr(value) if constant.get(name, True) else _of_argument(value, name in free))
        for name, value in bound.items()
    ]
    return kernel.fn.__name__, tuple(sorted(parts))


@cache
def _parameters(function: Callable) -> dict[str, bool]:
    """A kernel's parameters, and whether each is a constant."""
    parameters = inspect.signature(function).parameters
    return {name: "constexpr" in str(one.annotation) for name, one in parameters.items()}


def _of_argument(value, is_free: bool):
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, int):
        return "int" if is_free else "1" if value == 1 else f"multiple: {value % 16 == 0}"
    if isinstance(value, tuple | list):
        return tuple(_of_argument(one, is_free) for one in value)
    if hasattr(value, "block_shape"):
        return value.base.dtype, tuple(value.block_shape)
    return type(value).__name__


def write_shapes(directory: Path, name: str, changes: dict) -> Path:
    """Write config.json of a published model, and beside it of its EAGLE-3 head, of few layers."""
    with imported("under_load", "shapes") as modules:
        shapes = modules.shapes.SHAPES
    for folder in (name, f"eagle3-{name}"):
        if folder in shapes:
            (directory / folder).mkdir()
            text = json.dumps(_few_layers(shapes[folder] | changes))
            (directory / folder / "config.json").write_text(text)
    return directory / name


def _few_layers(config: dict) -> dict:
    """The config with two layers or more of each kind: the last of a model keeps fewer rows."""
    if "text_config" in config:
        return config | {"text_config": _few_layers(config["text_config"])}
    few = 2 * config.get("full_attention_interval", 2)
    config = config | {"num_hidden_layers": min(few, config["num_hidden_layers"])}
    if "hybrid_override_pattern" in config:
        pattern = config["hybrid_override_pattern"][:8]
        config |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    return config


def step_on_meta(
    path: Path,
    spec: SpeculativeConfig | None,
    max_num_seqs: int,
    max_len: int,
    parallel: TensorParallel = SINGLE_RANK,
    stored: torch.dtype = torch.bfloat16,
) -> Step:
    """The step of a GPU engine for a model's config.json, without memory. In ``recorded``.

    ``stored`` is the dtype of keys and values.
    """
    backend = Backend(TritonKernels(GemmTable(hopper=True)), step_ops, ngram.lookup, suffix.search)
    config, dtype = read_config(path, load_format=DUMMY), torch.bfloat16
    needs = needs_of_drafter(spec, config, dtype, path, DUMMY, parallel.size)
    quantization = read_quantization(config.extra, str(path))
    reader = dummy_reader(path, backend.model, dtype, META, (), parallel, quantization)
    target = model_class(config.architecture)(config, reader, max_positions=max_len).keeping(
        needs.aux_layers
    )
    divides = parallel if needs.num_ranks > 1 else SINGLE_RANK
    placement = Placement(backend, dtype, META, max_len, max_num_seqs, DUMMY, path, divides)
    drafter = load_drafter(spec, target, placement)
    k = spec.num_speculative_tokens if spec else 0

    def allocated(caches) -> ModelCache | None:
        sizes = {"num_blocks": 9, "block_size": 64, "max_num_seqs": max_num_seqs, "num_drafts": k}
        caches = stored_in(caches, stored)
        return ModelCache.allocate(caches, **sizes, device=META) if caches else None

    table = SamplingTable.allocate(max_num_seqs, META)
    coupling = Coupling(backend.model.sample, table)
    return Step(
        sequences=Sequences.allocate(
            max_num_seqs=max_num_seqs,
            max_len=max_len,
            num_drafts=k,
            block_size=64,
            reserved_block=0,
            device=META,
        ),
        model=target,
        kv=allocated(target.caches),
        kernels=backend.model,
        ops=step_ops,
        table=table,
        drafter=share_drafter(drafter.attach(allocated(drafter.caches), coupling), k, parallel),
        results=torch.zeros(max_num_seqs, NUM_COUNTS + k + 1, dtype=torch.int64, device=META),
        all_states=spec is not None and spec.method in HEADS and not needs.aux_layers,
        parallel=parallel,
    )


def run_on_meta(step: Step, shapes) -> None:
    """Run steps of these shapes."""
    with torch.inference_mode():
        for shape in shapes:
            step.verify_and_propose(step.forward(layout_of(shape)))


def layout_of(shape: StepShape) -> LayoutTable:
    """A layout without numbers."""
    size = TABLE_ROWS, shape.table_width
    return LayoutTable(torch.empty(size, dtype=torch.int64, device=META), shape)
