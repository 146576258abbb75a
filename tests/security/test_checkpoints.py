"""Files of checkpoints that lie: one typed error, in bounds of time and memory, or success."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import struct
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.checkpoints import (
    LLAMA,
    VOCAB,
    change_config,
    eagle1_tensors,
    head_tensors,
    write_eagle1,
    write_llama,
    write_safeailab,
    write_speculators,
)
from helpers.examples import FIXED
from helpers.forward import load
from helpers.gguf_files import convert
from helpers.hybrids import write_hybrid
from sametoken import LLM
from sametoken.bench.memory import measure_memory
from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.drafters.heads import read_token_map
from sametoken.engine.sampling_defaults import default_sampling_params
from sametoken.errors import CheckpointError, ConfigError, SametokenError
from sametoken.layers.rotary import DRAFT_POSITIONS, rotary_table
from sametoken.models import blocks
from sametoken.models.heads.eagle import Eagle1Checkpoint
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.models.load.files import INDEX, SINGLE
from sametoken.models.load.huggingface import open_weights
from sametoken.models.loader import read_config
from sametoken.ops.reference import ReferenceKernels
from sametoken.text.tokenizer import load_tokenizer, require_own_end
from sametoken.text.tokenizer_files import MAX_BYTES

CPU = torch.device("cpu")
#: Of one example, on a busy machine; without bounds it is minutes, or never.
SECONDS, MEGABYTES = 10.0, 700
FUZZ = settings(FIXED, max_examples=50)
HUGE = 10**15
DEEP = "[" * 100_000 + "]" * 100_000


@contextlib.contextmanager
def cheap():
    """Within bounds of time and memory, with a typed error or without."""
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with contextlib.suppress(SametokenError):
        yield
    assert time.monotonic() - began < SECONDS
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < MEGABYTES * 1000


# Any JSON file.


@pytest.fixture
def llama(tmp_path):
    return write_llama(tmp_path / "llama")


READERS = {
    "config.json": read_config,
    "generation_config.json": default_sampling_params,
    INDEX: open_weights,
    "tokenizer_config.json": load_tokenizer,
}
BROKEN = {
    "nested": DEEP,
    "nested in an object": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "nested less": '{"a":' + "[" * 500 + "]" * 500 + "}",
    "a number of 5000 digits": '{"vocab_size": ' + "9" * 5000 + "}",
    "not UTF-8": b"\xff\xfe{}",
    "no object": "[1]",
    "cut": '{"a": ',
    "empty": "",
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_json_that_cannot_be_is_refused_by_the_name_of_its_file(llama, name, content):
    (llama / SINGLE).rename(llama / "model-1.safetensors")
    raw = content if isinstance(content, bytes) else content.encode()
    (llama / name).write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"{name} "):
        READERS[name](llama)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["pipe", "directory", "socket", "endless", "sparse"])
def test_what_is_no_file_is_refused_at_once(llama, name, kind, monkeypatch):
    (llama / SINGLE).unlink()
    path = llama / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 2**40)
    else:
        monkeypatch.chdir(llama)  # a socket's path is short
        socket.socket(socket.AF_UNIX).bind(name)
    with pytest.raises(CheckpointError, match=name):
        READERS[name](llama)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "model.gguf"])
def test_a_pipe_in_place_of_weights_or_vocabulary_is_refused_at_once(tmp_path, name):
    directory = write_llama(tmp_path / "llama") if name != "model.gguf" else tmp_path
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(directory) if name == "tokenizer.json" else load(directory)


# Blame and numbers.


@pytest.mark.parametrize("ids", [-1, VOCAB, True, [[1]], [0, VOCAB], "2", 1.0])
def test_end_ids_that_are_no_tokens_are_refused_where_they_stand(llama, ids):
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id="):
        read_config(llama)
    (llama / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"/config\.json: eos_token_id="):
        read_config(change_config(llama, eos_token_id=ids))


def test_a_tokenizer_s_end_must_be_a_token_of_the_model():
    class Ends:
        eos_token_id = VOCAB

    with pytest.raises(CheckpointError, match=f"token {VOCAB}, and the model has {VOCAB}"):
        require_own_end(Ends(), VOCAB)
    require_own_end(Ends(), VOCAB + 1)


def test_a_broken_tokenizer_is_blamed_by_its_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer at .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_too_large_or_that_panics_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "tokenizer.json"
    file.touch()
    os.truncate(file, MAX_BYTES + 1)
    for path in (tmp_path, file):
        with pytest.raises(CheckpointError, match="above 268435456"):
            load_tokenizer(path)
    file.write_text("{}")

    class PanicException(BaseException):
        """As pyo3 raises it: no Exception."""

    def panic(*_, **__):
        raise PanicException("index out of bounds")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", panic)
    with pytest.raises(CheckpointError, match="PanicException: index out of bounds"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("claim", [HUGE, 2**63 - 1])
def test_a_claim_of_positions_sizes_no_table(llama, claim, monkeypatch):
    rows = []

    def spy(rope, **sizes):
        rows.append(sizes["max_positions"])
        return rotary_table(rope, **sizes)

    monkeypatch.setattr(blocks, "rotary_table", spy)
    with cheap():
        llm = LLM(
            model=str(change_config(llama, max_position_embeddings=claim)),
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=2**20,
            max_num_seqs=2,
        )
        # One block is reserved.
        assert llm.resolved.max_model_len == 2**20 // 256 - llm.resolved.config.block_size
        assert rows == [llm.resolved.max_model_len + DRAFT_POSITIONS]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"hidden_size": 2**40},
        {"intermediate_size": HUGE},
        {"num_attention_heads": 2**40},
        {"head_dim": 2**40},
        {"max_position_embeddings": 10**400},
        {"rms_norm_eps": 10**400},
        {"rope_theta": 10**400},
        {"rope_scaling": {"rope_type": "yarn", "factor": 10**400}},
        {"vocab_size": "9" * 10**6},
        {"rope_scaling": {"rope_type": ["yarn"] * 10**5}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_absurd_sizes_are_refused_before_anything_is_counted(llama, changes):
    change_config(llama, **changes)
    with cheap(), pytest.raises(SametokenError) as caught:
        measure_memory(EngineConfig(model=str(llama), load_format="dummy"))
    assert len(str(caught.value)) < 1000


# The index.


def sharded(directory: Path, name: object) -> Path:
    weight_map = dict.fromkeys(open_weights(directory).names(), name)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..\\outside.safetensors",
        "..",
        ".",
        "",
        "C:outside.safetensors",
        "a\0b",
        "x" * 1000,
        "\U0001f600" * 200,
        7,
        None,
        ["x"],
    ],
)
def test_an_index_that_leaves_its_folder_is_refused_by_name(llama, name):
    sharded(llama, name)
    (llama / SINGLE).rename(llama.parent / "outside.safetensors")
    with pytest.raises(CheckpointError, match=r"index\.json lists .*no name of a file beside it"):
        load(llama)


def test_files_that_are_links_load_as_in_the_hub_s_cache(llama):
    sharded(llama, "model-1-of-1.safetensors")
    blobs = llama.parent / "blobs"
    blobs.mkdir()
    for number, (name, target) in enumerate(
        [("config.json", "config.json"), (SINGLE, "model-1-of-1.safetensors"), (INDEX, INDEX)]
    ):
        (llama / name).rename(blobs / str(number))
        (llama / target).symlink_to(Path("..", "blobs", str(number)))
    assert load(llama).config.vocab_size == VOCAB


def test_a_tensor_in_two_files_is_refused(llama):
    (llama / "more.safetensors").write_bytes((llama / SINGLE).read_bytes())
    (llama / SINGLE).rename(llama / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"is in .* and in "):
        load(llama)


# Fuzzing.

NASTY = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        3,
        2**31,
        2**63,
        HUGE,
        10**400,
        -HUGE,
        0.0,
        -1.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "silu",
        "x" * 1000,
        [],
        [1],
        [[]],
        [None],
        ["a"],
        {},
        {"a": 1},
        {"rope_type": "yarn"},
        {"rope_type": "llama3"},
        {"rope_type": "linear"},
        {"rope_type": "yarn", "factor": "x"},
        {"type": []},
        ["full_attention"] * 4,
    ]
)
ROPE_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "rope_theta",
    "partial_rotary_factor",
    "truncate",
    "divisors",
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic", 3])},
    optional=dict.fromkeys(ROPE_KEYS, NASTY),
)
EXTRA = (
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "mlp_bias",
    "attention_bias",
    "eos_token_id",
    "bos_token_id",
    "dtype",
    "text_config",
    "quantization_config",
    "original_max_position_embeddings",
)
HYBRID = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "num_experts",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "full_attention_interval",
    "layer_types",
    "decoder_sparse_step",
    "mlp_only_layers",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "num_nextn_predict_layers",
    "num_hidden_layers",
    "rope_theta",
    "partial_rotary_factor",
)
HEAD = (
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "speculators_model_type",
    "transformer_layer_config",
    "eagle_aux_layer_semantics",
    "bias",
    "fusion_bias",
    "layernorms",
)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """By name: a directory, and its config.json as it was written."""
    root = tmp_path_factory.mktemp("intact")
    directories = {
        "llama": write_llama(root / "llama"),
        "qwen3_5": write_hybrid(root / "qwen3_5", "qwen3_5"),
        "qwen3_next": write_hybrid(root / "qwen3_next", "qwen3_next"),
        "safeailab": write_safeailab(root / "safeailab", head_tensors()),
        "speculators": write_speculators(root / "speculators", head_tensors()),
        "eagle": write_eagle1(root / "eagle", eagle1_tensors()),
    }
    return {name: (path, (path / "config.json").read_text()) for name, path in directories.items()}


def changes(*keys):
    values = st.one_of(NASTY, ROPE)
    return st.dictionaries(st.sampled_from(sorted(keys)), values, min_size=1, max_size=3)


@FUZZ
@given(changed=changes(*LLAMA, *EXTRA))
def test_a_config_of_any_values_loads_or_is_refused(intact, changed):
    directory, text = intact["llama"]
    (directory / "config.json").write_text(json.dumps(json.loads(text) | changed))
    with cheap():
        load(directory)
    with cheap():
        measure_memory(EngineConfig(model=str(directory), load_format="dummy"))


@FUZZ
@given(changed=changes(*HYBRID), kind=st.sampled_from(["qwen3_5", "qwen3_next"]))
def test_a_hybrid_s_config_of_any_values_loads_or_is_refused(intact, changed, kind):
    directory, text = intact[kind]
    config = json.loads(text)
    (config.get("text_config") or config).update(changed)
    (directory / "config.json").write_text(json.dumps(config))
    with cheap():
        load(directory)
    spec = SpeculativeConfig("mtp", 3)
    with cheap():
        measure_memory(
            EngineConfig(model=str(directory), load_format="dummy", speculative_config=spec)
        )


@FUZZ
@given(
    changed=changes(*HEAD, *EXTRA, "vocab_size", "num_hidden_layers"),
    which=st.sampled_from(["safeailab", "speculators", "eagle"]),
)
def test_a_head_s_config_of_any_values_loads_or_is_refused(intact, changed, which):
    directory, text = intact[which]
    (directory / "config.json").write_text(json.dumps(json.loads(text) | changed))
    kind = Eagle1Checkpoint if which == "eagle" else Eagle3Checkpoint
    (target, text) = intact["llama"]
    (target / "config.json").write_text(text)
    config = read_config(target)
    with cheap():
        head = kind(directory)
        head.require_fit(config)
        head.aux_layers(config.num_layers)
        head.load(
            load(target),
            kernels=ReferenceKernels(),
            dtype=torch.float32,
            device=CPU,
            max_positions=16,
        )


@FUZZ
@given(
    weight_map=st.one_of(
        NASTY, st.dictionaries(st.text(max_size=5), st.one_of(NASTY, st.text(max_size=8)))
    )
)
def test_an_index_of_any_values_loads_or_is_refused(tmp_path, weight_map):
    directory = write_llama(tmp_path / "llama", num_hidden_layers=1)
    (directory / SINGLE).unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with cheap():
        load(directory)


@FUZZ
@given(
    values=st.dictionaries(
        st.sampled_from(["temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens"]),
        NASTY,
    )
)
def test_recommendations_of_any_values_are_taken_or_refused(tmp_path, values):
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with cheap():
        default_sampling_params(tmp_path)


@FUZZ
@given(value=st.one_of(NASTY, st.lists(NASTY, max_size=3)))
def test_a_token_map_of_any_values_is_read_or_refused(tmp_path, value):
    (tmp_path / "map.json").write_text(json.dumps(value))
    with cheap():
        read_token_map(tmp_path / "map.json", 100)


def test_a_token_map_that_is_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "map.json")
    with pytest.raises(ConfigError, match=r"map\.json cannot be read"):
        read_token_map(tmp_path / "map.json", 100)


def safetensors_header(path: Path) -> dict:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size])


def write_header(path: Path, header: bytes, data: bytes, size: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if size is None else size) + header + data)


@FUZZ
@given(
    entry=st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(
                ["F32", "F16", "BF16", "F8_E4M3", "I64", "BOOL", "F4", "X", 3]
            ),
            "shape": st.one_of(
                NASTY, st.lists(st.sampled_from([0, 1, 8, 16, 23, 2**40, 2**63, -1]))
            ),
            "data_offsets": st.one_of(
                NASTY, st.lists(st.sampled_from([0, 4, 64, 1024, 2**40, 2**63, 2**64 - 1, -4]))
            ),
        },
    ),
    which=st.integers(0, 11),
    size=st.sampled_from([None, None, None, 0, 1, 2**26, 2**27, 2**40, 2**63, 2**64 - 1]),
    cut=st.sampled_from([None, None, 0, 7, 8, 100, -1]),
)
def test_a_safetensors_header_of_any_values_loads_or_is_refused(tmp_path, entry, which, size, cut):
    directory = write_llama(tmp_path / "llama", num_hidden_layers=1)
    path = directory / SINGLE
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = safetensors_header(path)
    name = sorted(set(header) - {"__metadata__"})[which]
    header[name].update(entry)
    write_header(path, json.dumps(header).encode(), whole[8 + length :], size)
    if cut is not None:
        path.write_bytes(path.read_bytes()[:cut])
    with cheap():
        load(directory)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    metadata = [("general.file_type", "add_uint32", 0)]
    return convert(LlamaForCausalLM(config), path, metadata=metadata).read_bytes()


#: Lengths, counts, types and offsets that a header may hold.
WORDS = st.sampled_from(
    [struct.pack("<Q", n) for n in (0, 1, 2**22, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)]
    + [struct.pack("<I", n) for n in (0, 8, 9, 99, 2**31)]
)


@settings(FUZZ, max_examples=100)
@given(damage=st.lists(st.tuples(st.integers(4, 1600), WORDS), min_size=1, max_size=3))
def test_a_gguf_header_of_any_words_loads_or_is_refused(tmp_path, gguf, damage):
    data = bytearray(gguf)
    for place, word in damage:
        data[place : place + len(word)] = word
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    for read in (load, load_tokenizer):
        with cheap():
            read(path)


GGUF_HEADERS = {
    "strings without end": struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**33),
    "values without end": struct.pack("<IQQ", 3, 0, 2**33),
    "tensors without end": struct.pack("<IQQ", 3, 2**33, 0),
    "bytes without end": struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 0, 2**39),
    "a string without end": struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"k", 8, 2**39),
    "a key without end": struct.pack("<IQQQ", 3, 0, 1, 2**39),
}


@pytest.mark.parametrize("header", GGUF_HEADERS.values(), ids=GGUF_HEADERS)
def test_a_sparse_gguf_file_does_not_feed_a_header_without_end(tmp_path, header):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + header)
    os.truncate(path, 2**40)
    with cheap(), pytest.raises(CheckpointError, match="its header has more than"):
        load(path)
