"""Hub ids: what the cache holds is used, what is needed is downloaded, errors say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.chat_model import save_tokenizer
from helpers.checkpoints import LLAMA, write_llama
from helpers.hub import COMMIT, cache_snapshot, serving_hub
from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.engine.load import validate
from sametoken.errors import CheckpointError, ConfigError, SametokenError, UnsupportedError
from sametoken.models.hub import HubId, Needed, model_name
from sametoken.models.loader import read_config
from sametoken.models.names import resolve_adapter, resolve_drafter, resolve_model

REPOSITORY = "tiny/llama"
OTHER_COMMIT = "2" * 40


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """A repository as they are: what the loader reads, and what it does not."""
    directory = write_llama(tmp_path_factory.mktemp("llama") / "llama")
    read = {path.name: path.read_bytes() for path in directory.iterdir()}
    return {
        **read,
        # The client downloads equal contents once.
        **{name: json.dumps({"name": name}).encode() for name in NEEDED - read.keys()},
        "README.md": b"# Llama",
        "consolidated.safetensors": b"the weights again",
        "pytorch_model.bin": b"and again",
        "onnx/model.onnx": b"and again",
        "original/params.json": b"{}",
        "vocab.json": b"{}",
        ".gitattributes": b"",
    }


NEEDED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and no hub."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def hub(cache, monkeypatch, files):
    from huggingface_hub import constants

    with serving_hub() as server:
        server.add(REPOSITORY, files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        use_endpoint(monkeypatch, server.url)
        yield server


def use_endpoint(monkeypatch, url: str) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def silent(text: str) -> None:
    pass


def find(name: str = REPOSITORY, needed: Needed = Needed.MODEL) -> Path:
    return resolve_model(name, silent, needed)


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@refs/pr/1", HubId("Qwen/Qwen3-0.6B", "refs/pr/1")),
        ("smollm2", None),
        ("/models/llama", None),
        ("./models/llama", None),
        ("~/models", None),
        ("models/", None),
        ("models/a/b", None),
        ("models/llama.gguf", None),
        ("tokenizers/tokenizer.json", None),
        ("Qwen/Qwen3@", None),
    ],
)
def test_what_is_a_hub_id(name, parsed):
    assert HubId.parse(name) == parsed


def test_only_what_the_loader_reads_is_downloaded_and_only_once(hub, cache, files):
    said = []
    folder = resolve_model(REPOSITORY, said.append)
    assert folder == cache / "models--tiny--llama" / "snapshots" / COMMIT
    assert names_in(folder) == NEEDED == set(hub.downloads)
    assert hub.downloads[-1] == "model.safetensors"
    assert read_config(folder).vocab_size == LLAMA["vocab_size"]
    assert said[0] == f"fetching {REPOSITORY} from {hub.url} into {cache}"
    assert said[1].startswith("fetched ")
    assert resolve_model(REPOSITORY, said.append) == folder
    assert said[2:] == [f"using {REPOSITORY} from {folder}"]
    assert len(hub.downloads) == len(NEEDED)


def test_a_revision_is_its_own_snapshot(hub, files):
    config = json.dumps(LLAMA | {"max_position_embeddings": 32}).encode()
    hub.add(REPOSITORY, files | {"config.json": config}, "short", OTHER_COMMIT)
    assert read_config(find()).max_position_embeddings == 64
    for revision in ("short", OTHER_COMMIT):
        folder = find(f"{REPOSITORY}@{revision}")
        assert folder.name == OTHER_COMMIT
        assert read_config(folder).max_position_embeddings == 32
    with pytest.raises(CheckpointError, match="tiny/llama has no revision 'none'"):
        find(f"{REPOSITORY}@none")


def test_shards_are_those_of_the_index(hub, files):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    shards = {"model-1.safetensors": b"1", "model-2.safetensors": b"2"}
    whole = {name: content for name, content in files.items() if name != "model.safetensors"}
    index_file = {"model.safetensors.index.json": json.dumps(index).encode()}
    hub.add(REPOSITORY, {**whole, **index_file, **shards})
    wanted = {*NEEDED, *index_file, *shards} - {"model.safetensors"}
    assert names_in(find()) == wanted


def test_an_index_may_add_to_a_single_file(hub, files):
    index = {"weight_map": {"a": "model.safetensors", "mtp.fc": "model_extra_tensors.safetensors"}}
    added = {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model_extra_tensors.safetensors": b"1",
    }
    hub.add(REPOSITORY, files | added)
    assert names_in(find()) == {*NEEDED, *added}


def test_a_repository_of_one_gguf_file(hub, files):
    gguf = {"README.md": b"", "model.Q8_0.gguf": b"GGUF", "config.json": b"{}"}
    hub.add(REPOSITORY, gguf)
    path = find()
    assert (path.name, path.read_bytes()) == ("model.Q8_0.gguf", b"GGUF")
    assert hub.downloads == ["model.Q8_0.gguf"]
    assert find() == path
    assert hub.downloads == ["model.Q8_0.gguf"]


@pytest.mark.parametrize("folder", ["", "Q4_K_M/"])
def test_a_repository_of_one_split_gguf_model(hub, folder):
    names = [f"{folder}model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    hub.add(REPOSITORY, {name: name.encode() for name in [names[2], "README.md", *names[:2]]})
    path = find()
    assert str(path).endswith(names[0])
    assert sorted(hub.downloads) == names
    assert find() == path
    assert sorted(hub.downloads) == names
    second = path.with_name("model-00002-of-00003.gguf")
    second.unlink()
    assert find() == path
    assert second.is_file()


def test_an_unsupported_gguf_file_is_refused_before_it_comes(hub):
    hub.add(REPOSITORY, {"model.gguf": b"GGUF"})
    hub.gguf[REPOSITORY] = {"total": 7, "architecture": "rwkv7", "context_length": 64}
    with pytest.raises(UnsupportedError, match="tiny/llama has GGUF architecture 'rwkv7'"):
        find()
    assert hub.downloads == []
    find(needed=Needed.TOKENIZER)
    hub.gguf[REPOSITORY]["architecture"] = "llama"
    assert find().name == "model.gguf"


def test_of_several_gguf_files_none_is_downloaded(hub):
    hub.add(REPOSITORY, {"a.gguf": b"GGUF", "b.gguf": b"GGUF"})
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models: a\.gguf, b\.gguf") as caught:
        find()
    assert "hf download tiny/llama FILE" in caught.value.remedy
    assert hub.downloads == []


def test_dummy_weights_and_tokenizers_need_no_weights(hub):
    assert find(needed=Needed.of("dummy")) == find(needed=Needed.TOKENIZER)
    assert set(hub.downloads) == NEEDED - {"model.safetensors"}


def test_a_vocabulary_comes_where_there_is_no_tokenizer_json(hub, files):
    slow = {name: content for name, content in files.items() if name != "tokenizer.json"}
    hub.add(REPOSITORY, slow)
    find(needed=Needed.TOKENIZER)
    assert "vocab.json" in hub.downloads


def test_a_draft_head_needs_no_architecture_of_ours(hub, files, tmp_path):
    config = json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}).encode()
    hub.add("tiny/head", {"config.json": config, "model.safetensors": files["model.safetensors"]})
    spec, _ = resolve_drafter(SpeculativeConfig("eagle3", 3, "tiny/head"), tmp_path, silent)
    assert names_in(Path(spec.model)) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "n_embd": 768}, "'GPT2LMHeadModel' is not"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_an_unsupported_model_is_refused_before_its_weights_come(hub, files, config, cause):
    hub.add(REPOSITORY, files | {"config.json": json.dumps(config).encode()})
    with pytest.raises(UnsupportedError, match=cause):
        find()
    assert "model.safetensors" not in hub.downloads


@pytest.mark.parametrize(
    ("changed", "options", "cause"),
    [
        ({"tokenizer.json": b"{"}, {}, "tokenizer"),
        ({"generation_config.json": b'{"top_p": 3}'}, {}, "top_p=3 is not possible"),
        ({}, {"tokenizer": "tiny/none"}, "'tiny/none' is neither a path"),
        ({}, {"max_model_len": 65}, "max_model_len=65 is above the model's 64"),
        ({}, {"speculative_config": {"model": "tiny/none"}}, "'tiny/none' is neither a path"),
    ],
)
def test_what_an_engine_would_refuse_is_refused_before_the_weights_come(
    hub, files, tmp_path, changed, options, cause
):
    tokenizer = {path.name: path.read_bytes() for path in save_tokenizer(tmp_path / "t").iterdir()}
    hub.add(REPOSITORY, files | tokenizer | changed)
    config = EngineConfig.from_options(model=REPOSITORY, device="cpu", **options)
    with pytest.raises(SametokenError, match=cause):
        validate(config, silent)
    assert "model.safetensors" not in hub.downloads


def test_weights_that_another_file_quantizes_do_not_come(hub, files):
    hub.add(REPOSITORY, files | {"hf_quant_config.json": b"{}"})
    with pytest.raises(UnsupportedError, match="hf_quant_config"):
        find()
    assert "model.safetensors" not in hub.downloads


def test_pickled_files_of_other_things_are_refused_before_they_come(hub, files):
    hub.add(REPOSITORY, {"config.json": files["config.json"], "optimizer.pt": b"pickle"})
    with pytest.raises(UnsupportedError, match="tiny/llama holds pickled files only"):
        find()
    assert hub.downloads == ["config.json"]


def test_pickled_weights_come_where_there_are_no_others(hub, files):
    index = json.dumps({"weight_map": {"lm_head.weight": "pytorch_model-1.bin"}}).encode()
    config = {"config.json": files["config.json"], "training_args.bin": b"code"}
    shards = {"pytorch_model.bin.index.json": index, "pytorch_model-1.bin": b"pickle"}
    hub.add(REPOSITORY, config | shards)
    assert find().is_dir()
    assert sorted(hub.downloads) == sorted(["config.json", *shards])


def test_a_cache_is_enough(cache, files):
    read = {name: files[name] for name in NEEDED}
    folder = cache_snapshot(cache, REPOSITORY, read)
    assert find() == folder
    assert find(needed=Needed.CONFIG) == find(needed=Needed.TOKENIZER) == folder
    assert find(f"{REPOSITORY}@{COMMIT}") == folder
    short = cache_snapshot(cache, REPOSITORY, read, "short", OTHER_COMMIT)
    assert find(f"{REPOSITORY}@short") == short
    assert find() == folder


def test_an_unfinished_download_is_finished(hub, cache, files):
    cache_snapshot(cache, REPOSITORY, {"config.json": files["config.json"]})
    assert names_in(find()) == NEEDED
    assert "config.json" not in hub.downloads


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
def test_offline_one_sentence_says_what_to_run(cache, files, missing):
    cache_snapshot(cache, REPOSITORY, {n: files[n] for n in NEEDED if n != missing})
    with pytest.raises(CheckpointError) as caught:
        find(f"{REPOSITORY}@main")
    assert caught.value.cause == (
        f"'tiny/llama' is no path, the cache {cache} does not hold all of it, and it cannot be "
        "downloaded (HF_HUB_OFFLINE is set)"
    )
    assert caught.value.remedy == (
        "run `hf download tiny/llama` on a machine with network, and copy its cache to "
        f"{cache}, or set HF_HOME to the copy"
    )


def test_without_network_the_reason_is_named(hub, monkeypatch):
    use_endpoint(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(CheckpointError, match=r"cannot be downloaded \(Connect") as caught:
        find("tiny/other@v2")
    assert "hf download tiny/other --revision v2" in caught.value.remedy


def test_what_the_hub_refuses(hub):
    hub.gated.add(REPOSITORY)
    with pytest.raises(CheckpointError, match="tiny/llama is gated") as caught:
        find()
    assert "hf auth login" in caught.value.remedy
    with pytest.raises(CheckpointError, match="'tiny/none' is neither a path nor a repository"):
        find("tiny/none")


def test_a_cache_that_cannot_be_written(hub, cache):
    cache.write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be stored") as caught:
        find()
    assert "HF_HOME" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("smolm2", "smollm2"),
        ("SmolLM2", "smollm2"),
        ("hybrid28m", "hybrid-28m"),
        ("tiny/lama", "tiny/llama"),
        ("llama-tiny@main", "tiny/llama-tiny"),
        ("modles/qwen3", "models/Qwen3"),
        ("models/Qwn3", "models/Qwen3"),
    ],
)
def test_mistyped_names_get_a_suggestion(cache, tmp_path, name, meant):
    cache_snapshot(cache, REPOSITORY, {"config.json": b"{}"})
    cache_snapshot(cache, "tiny/llama-tiny", {"config.json": b"{}"})
    (tmp_path / "models" / "Qwen3").mkdir(parents=True)
    with pytest.raises(CheckpointError) as caught:
        find(name)
    assert caught.value.remedy.startswith(f"did you mean '{meant}'? Otherwise ")


def test_nothing_alike_gets_no_suggestion(cache):
    with pytest.raises(CheckpointError, match="neither a path, a short name nor") as caught:
        find("gpt-5")
    assert caught.value.remedy.startswith("give a checkpoint directory")


ADAPTER = {
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.safetensors": b"factors",
}
BESIDE = {
    "README.md": b"",
    "adapter_model.bin": b"again",
    "optimizer.pt": b"state",
    "config.json": b"{}",
    "model.safetensors": b"a model",
    "tokenizer.json": b"{}",
}


def test_of_an_adapter_two_files_are_downloaded_once(hub, cache):
    hub.add("tiny/poet", ADAPTER | BESIDE)
    said = []
    folder = resolve_adapter("tiny/poet", said.append)
    assert names_in(folder) == ADAPTER.keys()
    assert hub.downloads == [*ADAPTER]
    assert resolve_adapter("tiny/poet@main", said.append) == folder
    assert said[2:] == [f"using tiny/poet from {folder}"]
    assert resolve_adapter(str(folder), said.append) == folder
    with pytest.raises(CheckpointError) as caught:
        resolve_adapter("tiny/poets", silent)
    assert caught.value.remedy.startswith("did you mean 'tiny/poet'?")


def test_a_pickled_adapter_comes_where_there_is_no_other(hub):
    pickled = ADAPTER.keys() - {"adapter_model.safetensors"} | {"adapter_model.bin"}
    files = {name: (ADAPTER | BESIDE)[name] for name in pickled}
    hub.add("tiny/poet", files | {"poet.gguf": b"GGUF"})
    assert names_in(resolve_adapter("tiny/poet", silent)) == pickled


def test_an_unfinished_download_of_an_adapter_is_finished(hub, cache):
    hub.add("tiny/poet", ADAPTER)
    config = {"adapter_config.json": ADAPTER["adapter_config.json"]}
    cache_snapshot(cache, "tiny/poet", config)
    assert names_in(resolve_adapter("tiny/poet", silent)) == ADAPTER.keys()


def test_an_adapter_that_is_not_supported_is_refused_before_its_weights_come(hub):
    hub.add("tiny/poet", ADAPTER | {"adapter_config.json": b'{"peft_type": "LOHA"}'})
    with pytest.raises(UnsupportedError, match="peft_type='LOHA'"):
        resolve_adapter("tiny/poet", silent)
    assert hub.downloads == ["adapter_config.json"]


def test_what_is_no_adapter(hub, tmp_path):
    hub.add("tiny/half", {"adapter_model.safetensors": b"factors"})
    for name in (REPOSITORY, "tiny/half"):
        with pytest.raises(CheckpointError, match=rf"{name} holds no adapter_config\.json"):
            resolve_adapter(name, silent)
    assert hub.downloads == []
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is one file of a checkpoint") as caught:
        resolve_adapter("adapter_model.bin", silent)
    assert str(tmp_path) in caught.value.remedy
    with pytest.raises(CheckpointError, match="'poet' is neither a path nor a hub id"):
        resolve_adapter("poet", silent)
    with pytest.raises(ConfigError, match="the name of an adapter is empty"):
        resolve_adapter("", silent)


RESOLVE = """
from sametoken.models.names import resolve_model
print(resolve_model("tiny/llama", print))
"""


def test_variables_name_cache_and_hub_and_a_pipe_gets_no_bar(tmp_path, files):
    with serving_hub() as server:
        server.add(REPOSITORY, files)
        variables = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-c", RESOLVE],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=True,
        )
    folder = tmp_path / "home" / "hub" / "models--tiny--llama" / "snapshots" / COMMIT
    assert done.stdout.splitlines()[-1] == str(folder)
    assert "\r" not in done.stderr
    assert "%" not in done.stderr


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"hub/models--org--Llama-3/snapshots/{COMMIT}", "Llama-3"),
        ("training/snapshots/step-7", "step-7"),
        ("Llama-3", "Llama-3"),
    ],
)
def test_a_cached_model_has_the_name_of_its_repository(path, name):
    assert model_name(Path(path)) == name
