"""LoRA adapters on a GPU: a row's bits whatever is beside it, and the law eager and captured."""

from __future__ import annotations

import pytest
import torch
from gpu_files import HYBRID_SIZES, LENGTHS, OPTIONS, SIZES, write_small_family
from recorded_gpu import windows_must_be_captured

from helpers.adapters import ATTENTION, MLP, write_adapter, write_stacks
from helpers.checkpoints import write_llama
from helpers.hybrids import write_hybrid
from sametoken import LLM, SamplingParams
from sametoken.ops.model.low_rank import Chosen, Factors, Room

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from sametoken.ops.model.low_rank_triton import StackedUpdates

BF16 = torch.bfloat16
MAX_TOKENS, COUNT = 40, 18
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
    "draft_limits": "fixed",
}


def noise(*shape: int, seed: int, dtype=BF16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def factors(sizes, in_features, rank, dtype) -> list[list[Factors | None]]:
    """Of three adapters; the second has none beside the first part."""
    return [
        [
            None
            if (number, part) == (1, 0)
            else Factors(
                noise(rank, in_features, seed=10 * number + part, dtype=dtype) / in_features**0.5,
                noise(size, rank, seed=50 + 10 * number + part, dtype=dtype),
                0.5 + number,
            )
            for part, size in enumerate(sizes)
        ]
        for number in range(3)
    ]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(
    ("sizes", "in_features"),
    [((4096, 1024, 1024), 4096), ((12288, 12288), 4096), ((4096,), 12288), ((576, 200), 1000)],
)
@pytest.mark.parametrize("rank", [1, 16, 64])
def test_a_row_has_its_bits_in_any_company(sizes, in_features, rank, dtype):
    parts = factors(sizes, in_features, rank, dtype)
    update = StackedUpdates.of(in_features, sizes, Room(3, rank, dtype, torch.device("cuda")))
    for place, own in enumerate(parts, start=1):
        update.prepare(own)(place)
    width = sum(sizes)
    x, before = noise(733, in_features, seed=1, dtype=dtype), noise(733, width, seed=2, dtype=dtype)
    chosen = torch.randint(0, 4, (733,), generator=torch.Generator().manual_seed(3)).cuda()
    # A tile with one adapter, one with many, one with none.
    chosen[:16], chosen[32:48] = 2, 0
    out = before.clone()
    update.begin(x, Chosen(chosen))(out)
    for count, first in ((1, 0), (1, 17), (16, 40), (17, 100), (129, 204), (512, 221)):
        rows = slice(first, first + count)
        alone = before[rows].clone()
        update.begin(x[rows], Chosen(chosen[rows]))(alone)
        assert torch.equal(alone, out[rows])
    assert torch.equal(out[chosen == 0], before[chosen == 0])
    assert torch.equal(out[chosen == 2, : sizes[0]], before[chosen == 2, : sizes[0]])
    # Last places of what is between the factors, whose sum is in fp32, and of the result.
    expected, bound = before.double(), torch.zeros_like(before, dtype=torch.float64)
    unit = 2**-7 if dtype is BF16 else 2**-20
    for number, own in enumerate(parts, 1):
        rows, begin = chosen == number, 0
        for part, size in zip(own, sizes, strict=True):
            if part is not None:
                own_x, down = x[rows].double(), part.down.double().T
                middle = (own_x @ down).to(dtype).double()
                unsure = unit * middle.abs() + 2**-18 * (own_x.abs() @ down.abs())
                up = part.scale * part.up.double().T
                expected[rows, begin : begin + size] += middle @ up
                bound[rows, begin : begin + size] = unsure @ up.abs()
            begin += size
    assert ((out.double() - expected).abs() <= bound + unit * expected.abs()).all()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("lora"), {}
    for name, target, more in (
        ("llama", write_llama(folder / "llama", **SIZES), ()),
        ("hybrid", write_hybrid(folder / "hybrid", **HYBRID_SIZES), ("in_proj_qkv", "out_proj")),
    ):
        every = write_adapter(folder / f"{name}-all", target, (*ATTENTION, *MLP, *more), seed=1)
        few = write_adapter(folder / f"{name}-few", target, ("q_proj", "v_proj"), 17, seed=2)
        found[name] = target, {"all": every, "few": few}
    sparse = write_small_family(folder / "sparse", "qwen3_moe")
    some = write_adapter(folder / "sparse-some", sparse, ("q_proj", *MLP), seed=1)
    stacks = write_stacks(folder / "sparse-stacks", sparse, 17, seed=2)
    return found | {"sparse": (sparse, {"all": some, "few": stacks})}


def engine(files, name, spec=None, **options) -> LLM:
    path, adapters = files[name]
    return LLM(
        str(path),
        lora_modules=adapters,
        speculative_config=spec,
        skip_tokenizer_init=True,
        **OPTIONS | {"max_num_seqs": 9} | options,
    )


def generate(llm: LLM, *, adapted: bool = True):
    """Every other request is sampled, and every third is the model's own, or all are."""
    generator, asked = torch.Generator().manual_seed(1), []
    for i in range(COUNT):
        length, period = LENGTHS[i % len(LENGTHS)], 3 + i % 5
        pattern = torch.randint(1, 1500, (period,), generator=generator).tolist()
        asked.append({"prompt_token_ids": (pattern * length)[:length]})
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=0.8 * (i % 2),
            seed=i,
            ignore_eos=True,
            logprobs=1,
        )
        for i in range(COUNT)
    ]
    names = [(None, "all", "few")[i % 3] if adapted else None for i in range(COUNT)]
    outputs = llm.generate(asked, params, lora_request=names)
    return [(one.outputs[0].token_ids, str(one.outputs[0].logprobs)) for one in outputs]


@pytest.fixture(scope="module")
def truth(files):
    """What eager steps of one request each say, without drafts."""
    options = {"enforce_eager": True, "steps_in_flight": 1, "max_num_seqs": 1}
    return {name: generate(engine(files, name, **options)) for name in files}


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("llama", None),
        ("llama", NGRAM),
        ("llama", "self"),
        ("hybrid", NGRAM),
        ("hybrid", "mtp"),
        ("sparse", NGRAM),
    ],
)
def test_the_same_tokens(files, truth, monkeypatch, name, spec, eager):
    if spec == "self":
        spec = {"method": "draft_model", "model": str(files[name][0]), "num_speculative_tokens": 3}
    if spec == "mtp":
        spec = {"method": "mtp", "num_speculative_tokens": 3}
    if not eager:
        windows_must_be_captured(monkeypatch)
    llm = engine(files, name, spec, enforce_eager=eager)
    assert generate(llm) == truth[name]
    # What a random hybrid says has no n-grams.
    if spec is NGRAM and name == "llama":
        assert llm.speculation_metrics.num_accepted_tokens > 0


def test_adapters_that_come_have_the_bits_of_those_of_the_start(files, truth, monkeypatch):
    """In captured steps, in places of others, in room for a larger rank, after a sleep."""
    windows_must_be_captured(monkeypatch)
    path, adapters = files["llama"]
    room = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64}
    options = OPTIONS | {"max_num_seqs": 9} | room
    llm = LLM(str(path), skip_tokenizer_init=True, speculative_config=NGRAM, **options)
    for first, second in (("few", "all"), ("all", "few")):
        llm.adapters.load("all", adapters[first])
        llm.adapters.load("few", adapters[second])
        said = generate(llm)
        assert (said == truth["llama"]) is (first == "all")
    llm.sleep()
    llm.wake_up()
    assert generate(llm) == truth["llama"]


@pytest.mark.parametrize("name", ["llama", "sparse"])
def test_a_request_without_an_adapter_has_the_model_s_bits(files, truth, name):
    path, _ = files[name]
    options = OPTIONS | {"max_num_seqs": 9}
    plain = generate(LLM(str(path), skip_tokenizer_init=True, **options), adapted=False)
    assert plain[::3] == truth[name][::3]
    assert all(one != other for one, other in zip(plain[1::3], truth[name][1::3], strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_have_bits_of_their_own_in_any_company(tmp_path):
    """Alone and eager as in graphs with drafts, of adapters of the start as of those that come."""
    # Ranks divide the vocabulary.
    target = write_llama(tmp_path / "llama", **SIZES)
    adapters = {
        name: write_adapter(tmp_path / name, target, modules, 5 + 12 * seed, seed=seed)
        for seed, (name, modules) in enumerate({"all": (*ATTENTION, *MLP), "few": MLP}.items())
    }
    found, two = {"llama": (target, adapters)}, {"tensor_parallel_size": 2}
    with engine(found, "llama", **two, enforce_eager=True, max_num_seqs=1) as llm:
        alone = generate(llm)
    room = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}
    with engine({"llama": (target, {})}, "llama", NGRAM, **two, **room) as llm:
        for first, second in (("few", "all"), ("all", "few")):
            llm.adapters.load("all", adapters[first])
            llm.adapters.load("few", adapters[second])
            assert (generate(llm) == alone) is (first == "all")
        assert generate(llm, adapted=False)[::3] == alone[::3]
