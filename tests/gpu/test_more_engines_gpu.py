"""Engines that the law test leaves out: EAGLE's first heads, modules of dense models, GGUF, fp32.

Each target answers plainly, one request at a time and without graphs; every drafter, in
graphs and without, must give the same ids, and the target as its own drafter is always right.
"""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType
from gpu_files import OPTIONS, SIZES, plain_requests, write_files, write_target
from recorded_gpu import drive, record
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from helpers.checkpoints import eagle1_tensors, write_eagle1, write_llama
from helpers.dense_modules import ERNIE, MIMO, write_module
from helpers.forward import CPU, Bench
from helpers.gguf_files import convert
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.models.loader import load_model
from sametoken.ops.reference import ReferenceKernels

MAX_TOKENS = 48
COUNT = 16
HEAD_SIZES = SIZES | {"num_hidden_layers": 1}
FP32 = {"torch_dtype": "float32"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}


def write_gguf(path, architecture: str, quantization: str):
    """A random model with matrices of one type."""
    kind, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[architecture]
    sizes = {name: value for name, value in SIZES.items() if name != "torch_dtype"}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = kind(**sizes, rope_parameters=rope, initializer_range=0.08, tie_word_embeddings=False)
    torch.manual_seed(3)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensor_type = GGMLQuantizationType[quantization]
    return convert(model_class(config).eval(), path, arch=architecture, tensor_type=tensor_type)


def drafted_by(method: str, model, k: int) -> dict:
    return {"method": method, "model": str(model), "num_speculative_tokens": k}


def eagle1_engines(folder):
    target = write_target(folder / "target", "LlamaForCausalLM")
    head = write_eagle1(folder / "head", eagle1_tensors(**HEAD_SIZES), **HEAD_SIZES)
    return target, "bfloat16", {"eagle": drafted_by("eagle", head, 3)}


def module_engines(kind: str):
    def write(folder):
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
        target = write_module(folder / "target", kind, **{name: SIZES[name] for name in sizes})
        drafts = {"method": "mtp", "num_speculative_tokens": 3, "draft_limits": "fixed"}
        return target, "bfloat16", {"mtp": drafts}

    return write


def gguf_engines(architecture: str, quantization: str):
    def write(folder):
        target = write_gguf(folder / "model.gguf", architecture, quantization)
        return target, "bfloat16", {"self": drafted_by("draft_model", target, 3), "ngram": NGRAM}

    return write


def fp32_engines(folder):
    target = write_llama(folder / "target", **SIZES | FP32)
    head = write_files(folder / "heads", "LlamaForCausalLM")["head"]
    first = write_eagle1(folder / "first", eagle1_tensors(**HEAD_SIZES), **HEAD_SIZES | FP32)
    drafters = {
        "self": drafted_by("draft_model", target, 3),
        "ngram": NGRAM,
        "eagle3": drafted_by("eagle3", head, 3),
        "eagle": drafted_by("eagle", first, 2),
    }
    return target, "float32", drafters


WRITERS = {
    "eagle1": (eagle1_engines, ("eagle",)),
    "mimo": (module_engines(MIMO), ("mtp",)),
    "ernie4.5": (module_engines(ERNIE), ("mtp",)),
    "gguf-llama-q8": (gguf_engines("llama", "Q8_0"), ("self", "ngram")),
    "gguf-qwen3-bf16": (gguf_engines("qwen3", "BF16"), ("self", "ngram")),
    "fp32": (fp32_engines, ("self", "ngram", "eagle3", "eagle")),
}
CASES = [(name, method) for name, (_, methods) in WRITERS.items() for method in methods]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By name: the target, its dtype, drafters, and the ids that are right; made on demand."""
    made = {}

    def get(name: str):
        if name not in made:
            target, dtype, drafters = WRITERS[name][0](tmp_path_factory.mktemp(name))
            truth = answer(target, dtype, max_num_seqs=1, enforce_eager=True)
            made[name] = target, dtype, drafters, truth.tokens
        return made[name]

    return get


def plain_items():
    """Requests whose logits need no processing: a twin's drafts are coupled to them alone."""
    return plain_requests(COUNT, MAX_TOKENS)


def answer(target, dtype: str, **options):
    config = OPTIONS | {"model": str(target), "dtype": dtype} | options
    return drive(build_engine(EngineConfig.from_options(**config)), plain_items())


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize(("name", "method"), CASES)
def test_the_same_ids(written, name, method, eager):
    target, dtype, drafters, truth = written(name)
    found = answer(
        target, dtype, speculative_config=drafters[method], max_num_seqs=6, enforce_eager=eager
    )
    assert found.tokens == truth
    assert found.offered > 0
    if method == "self":
        assert found.accepted == found.offered


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("name", ["gguf-llama-q8", "gguf-qwen3-bf16", "fp32"])
def test_plain_batches_give_the_same_ids(written, name, eager):
    target, dtype, _, truth = written(name)
    assert answer(target, dtype, max_num_seqs=6, enforce_eager=eager).tokens == truth


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_fp32_logits_are_those_of_the_reference(written, eager):
    """To within fp32 arithmetic in another order; TF32 products would be ten times as far off."""
    target, dtype, _, truth = written("fp32")
    (item,) = plain_items()[8:9]
    options = OPTIONS | {"dtype": dtype, "enforce_eager": eager, "max_num_seqs": 2}
    found = record([item], model=str(target), **options)
    prompt, tokens = item.prompt_token_ids, truth[item.request_id]
    model = load_model(
        target, kernels=ReferenceKernels(), dtype=torch.float32, device=CPU, max_positions=640
    )
    hidden = Bench(model, max_len=640, block_size=16).run([*prompt, *tokens[:-1]], 0).last
    expected = model.compute_logits(hidden[len(prompt) - 1 :]).double()
    rows = [found.rows[prompt, len(prompt) + r] for r in range(len(tokens))]
    error = (torch.stack(rows).double().cpu() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 1e-4
