"""Hidden states for training drafters: those of a plain forward pass, at committed positions.

Engines as a user builds them, over checkpoints on disk; every state by ``torch.equal``.
"""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from helpers.checkpoints import HIDDEN, LLAMA, VOCAB, write_llama
from helpers.forward import Bench, load
from helpers.harness import swapped_by
from helpers.hybrids import write_hybrid
from helpers.static_steps import in_steps
from sametoken import LLM, SamplingParams
from sametoken.cli.main import app
from sametoken.config import EngineConfig
from sametoken.engine.resolve import resolve_extraction
from sametoken.errors import ConfigError, EngineDeadError
from sametoken.extraction import recording as extraction
from sametoken.extraction import writer as state_writer
from sametoken.extraction.shards import ExtractedStates, prompt_digest, read_manifest
from sametoken.io.files import LOCK
from sametoken.ops.dispatch import select_kernels

CPU = torch.device("cpu")
MAX_TOKENS = 9
PROMPTS = [
    (3, 5),
    tuple(i * 7 % VOCAB for i in range(30)),
    (1, 2, 3, 4) * 6,
    tuple(i * 7 % VOCAB for i in range(21)),
    (8,),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("target"), max_position_embeddings=80)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return write_hybrid(tmp_path_factory.mktemp("hybrid"), max_position_embeddings=80)


def spec(directory, **more) -> dict:
    return {"method": "extract_hidden_states", "shared_storage_path": str(directory), **more}


def engine(path, directory=None, layers=None, **options) -> LLM:
    options = {
        "max_model_len": 64,
        "max_num_seqs": 3,
        "prefill_chunk_size": 16,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "skip_tokenizer_init": True,
        "device": "cpu",
    } | options
    if directory is not None:
        more = {"eagle_aux_hidden_state_layer_ids": layers} if layers else {}
        options["speculative_config"] = spec(directory, **more)
    return LLM(str(path), **options)


def generate(llm: LLM, prompts=PROMPTS, **params):
    params = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True} | params
    tokens = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    several = [SamplingParams(seed=i, **params) for i in range(len(tokens))]
    return llm.generate(tokens, several)


def all_tokens(outputs) -> list[list[int]]:
    return [[*one.prompt_token_ids, *done.token_ids] for one in outputs for done in one.outputs]


def plain_states(path, tokens: list[int], layers: tuple[int, ...], dtype) -> torch.Tensor:
    """[n - 1, layers, hidden] of one pass over all tokens but the last."""
    model = load(path, select_kernels(CPU), dtype=dtype, aux_layers=layers)
    hidden = Bench(model, max_len=80).run(tokens[:-1], 0)
    return hidden.auxiliary.view(len(tokens) - 1, len(layers), -1)


def check(path, directory, outputs, layers=(2, 2, 1), dtype=torch.float32) -> None:
    """The directory holds exactly these outputs, and true states of their positions."""
    manifest, found = read_manifest(directory), ExtractedStates(directory)
    assert manifest.complete
    assert all(one.complete for one in manifest.sequences)
    sequences = [found[i] for i in range(len(found))]
    wanted = all_tokens(outputs)
    assert sorted(one.token_ids.tolist() for one in sequences) == sorted(wanted)
    for one in sequences:
        tokens = one.token_ids.tolist()
        assert torch.equal(one.hidden_states, plain_states(path, tokens, layers, dtype)), tokens
    prompt_lens = {
        prompt_digest(one.prompt_token_ids): len(one.prompt_token_ids) for one in outputs
    }
    assert {one.prompt_digest: one.prompt_len for one in manifest.sequences} == prompt_lens
    num_rows = sum(r.stop - r.start for shard in manifest.shards for r in shard.ranges)
    assert num_rows == sum(len(tokens) - 1 for tokens in wanted)
    files = {shard.file for shard in manifest.shards} | {"manifest.json", LOCK}
    assert {entry.name for entry in directory.iterdir()} == files


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize(("temperature", "steps"), [(0.0, "compact"), (0.9, "static")])
def test_states_are_those_of_a_plain_forward_pass(
    target, tmp_path, steps_in_flight, temperature, steps
):
    plain = generate(engine(target), temperature=temperature)
    llm = engine(target, tmp_path, steps_in_flight=steps_in_flight)
    llm._engine._runner = in_steps(llm._engine._runner, steps)
    outputs = generate(llm, temperature=temperature)
    assert all_tokens(outputs) == all_tokens(plain)
    check(target, tmp_path, outputs)


@pytest.mark.parametrize("layers", [(0, 4), (3,)])
def test_layers_are_chosen_and_bf16_is_kept(target, tmp_path, layers):
    outputs = generate(engine(target, tmp_path, layers=layers, dtype="bfloat16"))
    check(target, tmp_path, outputs, layers, torch.bfloat16)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["eagle_aux_hidden_state_layer_ids"] == list(layers)
    assert (manifest["dtype"], manifest["hidden_size"]) == ("bfloat16", LLAMA["hidden_size"])
    assert (manifest["model"], manifest["num_hidden_layers"]) == (str(target), 4)


@pytest.mark.parametrize(("steps_in_flight", "swap_space"), [(1, 1), (3, 1), (3, 0)])
def test_preempted_requests_and_small_shards(
    target, tmp_path, monkeypatch, steps_in_flight, swap_space
):
    monkeypatch.setattr(extraction, "SHARD_BYTES", 40 * 3 * HIDDEN * 4)
    llm = engine(
        target, tmp_path, num_kv_blocks=9, steps_in_flight=steps_in_flight, swap_space=swap_space
    )
    swapped = swapped_by(llm._engine, monkeypatch)
    outputs = generate(llm, max_tokens=20)
    assert llm._engine.scheduler.num_preemptions
    assert bool(swapped) == bool(swap_space)
    check(target, tmp_path, outputs)
    shards = read_manifest(tmp_path).shards
    ranges = [part.sequence for shard in shards for part in shard.ranges]
    assert len(shards) > 2
    assert len(ranges) > len(set(ranges)), "no sequence is spread over shards"


@pytest.mark.parametrize("steps", ["compact", "static"])
def test_a_hybrid_s_states(hybrid, tmp_path, steps):
    llm = engine(hybrid, tmp_path, layers=(1, 4))
    llm._engine._runner = in_steps(llm._engine._runner, steps)
    outputs = generate(llm, PROMPTS[:3])
    check(hybrid, tmp_path, outputs, (1, 4))


def test_stops_cut_the_rows_too(target, tmp_path):
    plain = generate(engine(target))
    stops = [one.outputs[0].token_ids[3] for one in plain]
    llm = engine(target, tmp_path, steps_in_flight=3)
    outputs = generate(llm, ignore_eos=False, stop_token_ids=stops)
    assert {one.outputs[0].finish_reason for one in outputs} == {"stop"}
    check(target, tmp_path, outputs)


def test_a_second_engine_adds_to_what_is_there(target, tmp_path):
    first = generate(engine(target, tmp_path), PROMPTS[:2])
    before = read_manifest(tmp_path)
    done = {one.prompt_digest for one in before.sequences if one.complete}
    rest = [prompt for prompt in PROMPTS if prompt_digest(prompt) not in done]
    assert rest == PROMPTS[2:]
    llm = engine(target, tmp_path)
    second = generate(llm, rest[:1]) + generate(llm, rest[1:])
    check(target, tmp_path, first + second)
    after = read_manifest(tmp_path)
    assert after.shards[: len(before.shards)] == before.shards
    assert after.sequences[: len(before.sequences)] == before.sequences


def test_two_engines_do_not_share_a_directory(target, tmp_path, monkeypatch):
    one, other = tmp_path / "one", tmp_path / "other"
    first = engine(target, one)
    with monkeypatch.context() as patched:
        # Refused before anything is loaded; an engine that failed later holds nothing.
        patched.setattr("sametoken.engine.load.load_model", None)
        with pytest.raises(ConfigError, match="is held by process"):
            engine(target, one)
        with pytest.raises(TypeError) as failed:
            engine(target, other)
    check(target, one, generate(first, PROMPTS[:2]))
    check(target, other, generate(engine(target, other), PROMPTS[:1]))
    assert failed.tb is not None


def test_an_engine_that_failed_lets_its_directory_go(target, tmp_path, monkeypatch):
    llm = engine(target, tmp_path)
    monkeypatch.setattr(llm._engine._extraction, "process_output", None)
    with pytest.raises(EngineDeadError):
        generate(llm, PROMPTS[:1])
    check(target, tmp_path, generate(engine(target, tmp_path), PROMPTS[:1]))


def test_a_stream_that_is_closed_leaves_nothing(target, tmp_path):
    llm = engine(target, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, seed=0)
    stream = llm.generate_stream({"prompt_token_ids": [1, 2, 3]}, params)
    next(stream)
    next(stream)
    stream.close()
    outputs = generate(llm, PROMPTS[:2])
    check(target, tmp_path, outputs)


def test_several_completions_are_sequences_of_their_own(target, tmp_path):
    llm = engine(target, tmp_path)
    params = SamplingParams(n=3, temperature=1.0, max_tokens=6, ignore_eos=True, seed=4)
    outputs = llm.generate([{"prompt_token_ids": list(PROMPTS[2])}], params)
    check(target, tmp_path, outputs)
    assert {one.request_id for one in read_manifest(tmp_path).sequences} == {"0.0", "0.1", "0.2"}


def test_the_prefix_cache_is_off_and_says_so(target, tmp_path):
    said = []
    llm = engine(target, tmp_path, announce=said.append)
    assert not llm.resolved.config.enable_prefix_caching
    assert "cached positions" in llm.resolved.reasons["enable_prefix_caching"]
    assert any("enable_prefix_caching is off" in line for line in said)
    outputs = [*generate(llm, [PROMPTS[1]]), *generate(llm, [PROMPTS[3]])]
    assert {one.metrics.num_cached_tokens for one in outputs} == {0}
    check(target, tmp_path, outputs)


def test_what_cannot_be_written_is_refused_before_anything_is_loaded(target, tmp_path, monkeypatch):
    monkeypatch.setattr("sametoken.engine.load.load_model", None)
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(ConfigError, match="cannot be created"):
        engine(target, tmp_path / "file")
    with pytest.raises(ConfigError, match="the model has 4 layers"):
        engine(target, tmp_path / "new", layers=(5,))


def test_a_shard_that_cannot_be_written_ends_the_engine(target, tmp_path, monkeypatch):
    llm = engine(target, tmp_path)

    def fails(*args):
        raise ConfigError("the disk is full")

    monkeypatch.setattr(state_writer, "write_shard", fails)
    with pytest.raises(ConfigError, match="the disk is full"):
        generate(llm, PROMPTS[:1])
    assert not read_manifest(tmp_path).complete


def test_a_gpu_takes_eager_steps_for_it(target, tmp_path):
    config = EngineConfig.from_options(model=str(target), speculative_config=spec(tmp_path))
    config, reasons = resolve_extraction(config, torch.device("cuda"))
    assert config.enforce_eager
    assert "eager steps" in reasons["enforce_eager"]
    config, reasons = resolve_extraction(config, CPU)
    assert reasons == {}


def test_the_command_line_writes_states(tmp_path):
    path = write_llama(tmp_path / "target")
    words = Tokenizer(WordLevel({chr(ord("a") + i): i for i in range(VOCAB)}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    states = tmp_path / "states"
    for prompt in ("b c d e", "t u v"):
        arguments = ["--prompt", prompt, "--max-tokens", "4", "--temperature", "0", "--json"]
        config = json.dumps(spec(states, num_speculative_tokens=1))
        result = CliRunner().invoke(
            app, ["generate", str(path), *arguments, "--speculative-config", config]
        )
        assert result.exit_code == 0, result.output
    found = ExtractedStates(states)
    assert [found[i].prompt_len for i in range(len(found))] == [4, 3]
    said = json.loads(result.stdout)
    tokens = [*said["prompt_token_ids"], *said["token_ids"]]
    assert found[1].token_ids.tolist() == tokens
    wanted = plain_states(path, tokens, (2, 2, 1), torch.float32)
    assert torch.equal(found[1].hidden_states, wanted)
    result = CliRunner().invoke(
        app, ["generate", str(path), "--explain", "--speculative-config", json.dumps(spec(path))]
    )
    assert "states of cached positions are not computed" in result.output
