"""LoRA adapters that come and go: the tokens of engines that have them from their start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from shutil import copytree, rmtree

import httpx
import pytest
import torch

from helpers.adapters import ATTENTION, MLP, in_memory, write_adapter, write_stacks
from helpers.chat_model import write_chat_model
from helpers.checkpoints import write_llama
from helpers.families import write_family
from helpers.http_server import TOY_ENGINE, RunningServer, free_port, running_server
from helpers.updates import NGRAM, PROMPTS, engine, params
from sametoken import LLM, LoRARequest, RequestOutput, SamplingParams
from sametoken.config import EngineConfig
from sametoken.engine import live_adapters
from sametoken.engine.adapters import read_adapters
from sametoken.errors import CheckpointError, RequestError, WeightUpdateError
from sametoken.models.load.adapter import StoredAdapter, open_adapter
from sametoken.serving.weight_sender import WeightSender
from sametoken.types.lora_modules import LoRAModule

#: Sizes that two ranks divide.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 24}
ROOM = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    target = write_llama(folder / "llama", **HEADS)
    forms = {"all": (*ATTENTION, *MLP), "few": ("q_proj", "v_proj"), "down": ("down_proj",)}
    adapters = {
        name: write_adapter(folder / name, target, modules, rank=3 + 2 * seed, seed=seed)
        for seed, (name, modules) in enumerate(forms.items())
    }
    return {"llama": target} | adapters


def bits(output: RequestOutput) -> tuple:
    """Tokens and log-probabilities, to the bit."""
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def said(llm: LLM, chosen=None) -> list[tuple]:
    return [bits(one) for one in llm.generate(PROMPTS, params(), lora_request=chosen)]


@pytest.fixture(scope="module")
def truth(files):
    """What engines say that have one adapter alone, from their start, and no drafts."""
    alone = {name: {"own": files[name]} for name in ("all", "few", "down")}
    found = {
        name: said(engine(files["llama"], lora_modules=one), "own") for name, one in alone.items()
    }
    found[None] = said(engine(files["llama"]))
    assert len({str(one) for one in found.values()}) == 4, "an adapter changes nothing"
    return found


def load_a(llm: LLM, path: Path, way: str) -> None:
    """Load an adapter as "a"; nothing that it came from is there any more."""
    if way == "path":
        with pytest.MonkeyPatch.context() as patch:
            gone = copytree(path, path.with_name("gone"))

            def opened(at: Path) -> StoredAdapter:
                found = open_adapter(at)
                rmtree(at)
                return found

            # Before any other rank could read it.
            patch.setattr(live_adapters, "open_adapter", opened)
            llm.adapters.load("a", gone)
        return
    own = in_memory(path)
    llm.adapters.load("a", **own)
    for tensor in own["tensors"].values():
        tensor.fill_(torch.nan)


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_come_and_go_and_leave_nothing_behind(files, truth, ranks):
    """Names and places are used again: no KV, factor or number of the adapter before is read."""
    divided = {"tensor_parallel_size": ranks, "steps_in_flight": 2}
    with engine(files["llama"], NGRAM, **ROOM | divided) as llm:
        plain = truth[None] if ranks == 1 else said(llm)
        expected = {None: plain}
        for name, way in (("all", "path"), ("few", "memory"), ("down", "path"), ("all", "memory")):
            load_a(llm, files[name], way)
            found = said(llm, "a")
            # Two ranks have bits of their own, which are those of the first time.
            assert found == expected.setdefault(name, truth[name] if ranks == 1 else found)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in truth[name]]
        llm.adapters.load("b", files["down"])
        mixed = said(llm, ["a", "b", None, "b"])
        assert mixed == [expected[name][i] for i, name in enumerate(("all", "down", None, "down"))]
        llm.adapters.unload("a")
        assert llm.adapters.names == ("b",)
        with pytest.raises(RequestError, match="there is no adapter 'a'"):
            said(llm, "a")
        assert said(llm, "b") == expected["down"]
        assert said(llm) == plain
        # Of the last "a" and of "b": those before them are forgotten.
        assert sorted(llm._engine.adapters._model.places.values()) == [1, 2]
        assert llm.speculation_metrics.num_accepted_tokens > 0


def test_adapters_of_experts_come_where_there_is_room_beside_them(tmp_path):
    target = write_family(tmp_path / "target", "qwen3_moe")
    adapter = write_stacks(tmp_path / "adapter", target)
    few = write_adapter(tmp_path / "few", target, ("q_proj", "experts.3.up_proj"), rank=5)
    with engine(target, lora_modules={"own": adapter}) as llm:
        truth = {"stacks": said(llm, "own"), None: said(llm)}
    with engine(target, lora_modules={"own": few}) as llm:
        truth["few"] = said(llm, "own")
    no_room = pytest.raises(RequestError, match=r"no room beside them.*Start with lora_experts")
    with engine(target, **ROOM) as llm, no_room:
        llm.adapters.load("a", adapter)
    for ranks in (1, 2):
        divided = {"tensor_parallel_size": ranks, "max_loras": 1, "lora_experts": True}
        with engine(target, NGRAM, **ROOM | divided) as llm:
            for name, path in (("stacks", adapter), ("few", few), ("stacks", adapter)):
                load_a(llm, path, "path" if name == "few" else "memory")
                found = said(llm, ["a", None, "a", "a"])
                expected = [truth[own][i] for i, own in enumerate((name, None, name, name))]
                # Two ranks have bits of their own.
                same = [one[0] for one in found] == [one[0] for one in expected]
                assert same if ranks == 2 else found == expected


def test_those_of_the_start_have_room_whatever_the_options_say(tmp_path):
    target = write_family(tmp_path / "target", "qwen3_moe")
    stacks = write_stacks(tmp_path / "stacks", target)
    few = write_adapter(tmp_path / "few", target, ("q_proj",), rank=5)
    own = {"stacks": stacks, "few": few}
    with engine(target, lora_modules=own) as llm:
        truth = {name: said(llm, name) for name in own}
    with engine(target, lora_modules=own, **ROOM | {"max_loras": 1, "max_lora_rank": 2}) as llm:
        assert {name: said(llm, name) for name in own} == truth
        with pytest.raises(RequestError, match="room for 2 adapters"):
            llm.adapters.load("third", few)


def test_a_trainer_may_send_the_widest_adapter_and_no_more(tmp_path):
    """In 8 bytes an element, of all linears, routers and experts, in the largest rank."""
    target = write_family(tmp_path / "target", "qwen3_moe")
    rank, names = ROOM["max_lora_rank"], (*ATTENTION, *MLP, "gate")
    widest = in_memory(write_adapter(tmp_path / "widest", target, names, rank=rank))
    with engine(target, **ROOM, lora_experts=True) as llm:
        sizes = [one.numel() for one in widest["tensors"].values()]
        assert llm._engine.adapters.require_room() == 8 * sum(sizes)
        llm.adapters.load("a", **widest)


def test_a_request_brings_its_adapter(files, truth):
    with engine(files["llama"], lora_modules={"own": files["few"]}, **ROOM) as llm:
        for name in ("all", "down", "all"):
            brought = LoRARequest(name, 1, str(files[name]))
            assert said(llm, [brought, "own", None, brought]) == [
                truth[one][i] for i, one in enumerate((name, "few", None, name))
            ]
            assert llm.adapters.names == ("own", name)
        three = [LoRARequest(name, 1, str(files[name])) for name in ("all", "down")]
        with pytest.raises(RequestError, match="room for 2 adapters"):
            said(llm, [*three, "own", None])
        assert said(llm, "own") == truth["few"]


def test_what_goes_for_an_adapter_that_a_request_brings(files, truth):
    """No request has it, a request brought it too, and the new one can be read."""
    brought = {name: LoRARequest(name, 1, str(files[name])) for name in ("all", "few", "down")}
    nowhere = LoRARequest("nowhere", 1, str(files["llama"]))
    with engine(files["llama"], **ROOM) as llm:

        def bring(name: str) -> None:
            (output,) = llm.generate(PROMPTS[0], params(2), lora_request=brought[name])
            assert output.outputs[0].token_ids == truth[name][0][0][:2]

        for name in brought:
            bring(name)
        assert llm.adapters.names == ("few", "down")
        stream = llm.generate_stream(PROMPTS[0], params(), lora_request=brought["all"])
        next(stream)
        bring("few")
        with pytest.raises(RequestError, match=r"holds no adapter_config\.json"):
            said(llm, nowhere)
        assert llm.adapters.names == ("all", "few")
        bring("down")
        assert llm.adapters.names == ("all", "down")
        assert bits([*stream][-1]) == truth["all"][0]
        llm.adapters.load("all", files["all"])
        for name in ("few", "down"):
            bring(name)
            assert llm.adapters.names == ("all", name)


def test_a_request_that_runs_keeps_its_adapter(files, truth):
    with engine(files["llama"], **ROOM | {"max_loras": 1}) as llm:
        llm.adapters.load("a", files["all"])
        stream = llm.generate_stream(PROMPTS[0], params(), lora_request="a")
        next(stream)
        for name in ("a", "b"):
            with pytest.raises(RequestError, match=r"room for 1 adapters.*max_loras"):
                llm.adapters.load(name, files["few"])
        llm.adapters.unload("a")
        with pytest.raises(RequestError, match="room for 1 adapters"):
            llm.adapters.load("b", files["few"])
        assert bits([*stream][-1]) == truth["all"][0]
        llm.adapters.load("b", files["few"])
        assert said(llm, "b") == truth["few"]


def test_a_request_on_its_way_has_the_adapter_that_is_there_when_it_comes(files, truth):
    """Without a spare place too; unless there is none any more."""
    with engine(files["llama"], **ROOM | {"max_loras": 1}) as llm:
        llm.adapters.load("a", files["all"])
        stream = llm.generate_stream(PROMPTS[0], params(), lora_request="a")
        llm.adapters.load("a", files["few"])
        assert bits([*stream][-1]) == truth["few"][0]
        stream = llm.generate_stream(PROMPTS[0], params(), lora_request="a")
        llm.adapters.unload("a")
        with pytest.raises(RequestError, match="there is no adapter 'a'"):
            next(stream)


def test_a_request_that_waits_keeps_its_adapter(files, truth):
    """The engine took it before another one came in its place, and begins it after that."""
    with engine(files["llama"], **ROOM | {"max_num_seqs": 1}) as llm:
        llm.adapters.load("a", files["all"])

        def replaced(index: int, output: RequestOutput) -> None:
            llm.adapters.load("a", files["few"])

        outputs = llm.generate(PROMPTS, params(), lora_request="a", on_finished=replaced)
        assert [bits(one) for one in outputs] == truth["all"]
        assert said(llm, "a") == truth["few"]


def test_what_does_not_fit_changes_nothing(files, truth, tmp_path):
    wide = write_llama(tmp_path / "wide", **HEADS | {"hidden_size": 32})
    others = {
        "neither a path nor a hub id": tmp_path / "nowhere",
        "32 x 32, the model's has 32 x 16": write_adapter(tmp_path / "w", wide, ("q_proj",)),
        "has rank 9, and there is room for 8": write_adapter(
            tmp_path / "r", files["llama"], ("q_proj",), rank=9
        ),
        "no linears or experts of this model": write_stacks(
            tmp_path / "e", write_family(tmp_path / "moe", "qwen3_moe")
        ),
    }
    with engine(files["llama"], **ROOM) as llm:
        llm.adapters.load("a", files["all"])
        for why, path in others.items():
            with pytest.raises(RequestError, match=why) as caught:
                llm.adapters.load("a", path)
            assert caught.value.param == "lora_path"
        for name in ("", "a=b", "a\n", 5):
            with pytest.raises(RequestError, match="is no adapter"):
                llm.adapters.load(name, files["all"])
        own = in_memory(files["few"])
        first = next(iter(own["tensors"]))
        for why, bad in (
            ("both a path and tensors", {"path": files["few"]}),
            ("neither a path nor tensors", {"tensors": None, "config": None}),
            ("is a mapping of tensors", {"config": None}),
            ("is a mapping of tensors", {"tensors": None}),
            (
                "config: use_dora=True is not supported",
                {"config": own["config"] | {"use_dora": True}},
            ),
            ("with the r of 4", {"config": own["config"] | {"r": 4}}),
            ("config: 1 is no name", {"config": own["config"] | {1: 4}}),
            ("rank_pattern: 1 is no name", {"config": own["config"] | {"rank_pattern": {1: 4}}}),
            ("on the meta device", {"tensors": {first: own["tensors"][first].to("meta")}}),
            (f"{first} without its pair", {"tensors": {first: own["tensors"][first]}}),
            (
                "of torch.int8",
                {"tensors": {k: v.to(torch.int8) for k, v in own["tensors"].items()}},
            ),
        ):
            with pytest.raises(RequestError, match=why) as caught:
                llm.adapters.load("a", **own | bad)
            assert caught.value.param == "lora_path"
        assert said(llm, "a") == truth["all"]
    with (
        engine(files["llama"], lora_modules={"a": files["all"]}) as llm,
        pytest.raises(RequestError, match="Start with enable_lora"),
    ):
        llm.adapters.load("b", files["few"])


def test_ranks_that_read_different_files_at_the_start_refuse_them(files):
    config = EngineConfig(lora_modules=(LoRAModule("a", str(files["all"])),))
    assert [one.location for one in read_adapters(config)] == [str(files["all"])]
    with pytest.raises(CheckpointError, match="written while it was read"):
        read_adapters(config, lambda own: [((0, 0, 0), *stamps[1:]) for stamps in own])


SAMPLING = {"temperature": 0.8, "seed": 5, "max_tokens": 24, "ignore_eos": True}
PROMPT = "the inner the other the inner the other"


class Client(httpx.Client):
    """Of a server without adapters, and of one whose files are at ``path``."""

    def __init__(self, server: RunningServer, path: Path, tokens: list[int]) -> None:
        super().__init__(base_url=server.url, timeout=120)
        self.server, self.path, self.tokens = server, path, tokens

    def ask(self, name: str = "sql") -> httpx.Response:
        more = {"prompt": PROMPT, "return_token_ids": True}
        return self.send_json("completions", model=name, **more, **SAMPLING)

    def send_json(self, route: str, **body) -> httpx.Response:
        return self.post(f"/v1/{route}", json=body)

    def names(self) -> list[str]:
        return [one["id"] for one in self.get("/v1/models").json()["data"]]

    def answers_and_goes(self, name: str = "sql") -> None:
        """The adapter says what one of the start says, and then none has its name."""
        assert self.ask(name).json()["choices"][0]["token_ids"] == self.tokens
        assert self.send_json("unload_lora_adapter", lora_name=name).status_code == 200
        assert self.ask(name).status_code == 404


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("http")
    model = write_chat_model(folder / "model")
    path = write_adapter(folder / "sql", model, ATTENTION, seed=1)
    with LLM(str(model), **TOY_ENGINE, lora_modules={"sql": path}) as llm:
        (output,) = llm.generate(PROMPT, SamplingParams(**SAMPLING), lora_request="sql")
    with (
        running_server(
            model,
            engine={"speculative_config": NGRAM, "enable_lora": True},
            served_model_name=("toy",),
            allow_runtime_lora_updating=True,
            weight_transfer_config='{"backend": "gloo"}',
        ) as server,
        Client(server, path, list(output.outputs[0].token_ids)) as client,
    ):
        yield client


def test_adapters_come_and_go_over_http(client, tmp_path):
    assert client.ask().status_code == 404
    loaded = {"lora_name": "sql", "lora_path": str(client.path)}
    answer = client.send_json("load_lora_adapter", **loaded)
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    assert client.names() == ["toy", "sql"]
    assert client.ask().json()["choices"][0]["token_ids"] == client.tokens
    again = client.send_json("load_lora_adapter", **loaded)
    assert again.status_code == 400
    assert "set load_inplace" in again.json()["error"]["message"]
    again = client.send_json("load_lora_adapter", **loaded, load_inplace=True)
    assert again.status_code == 200
    for bad, why in (
        ({"lora_name": "toy"}, "is a name of the model"),
        ({"lora_name": "a=b"}, "is no adapter"),
        ({"lora_path": str(tmp_path)}, "holds no adapter_config.json"),
    ):
        refused = client.send_json("load_lora_adapter", **loaded | {"lora_name": "b"} | bad)
        assert refused.status_code == 400, refused.text
        assert why in refused.json()["error"]["message"]
    client.answers_and_goes()
    assert client.names() == ["toy"]
    assert client.send_json("unload_lora_adapter", lora_name="sql").status_code == 400


def test_adapters_come_from_trainers(client):
    """As TRL loads each version under its name; from this process; and over a trainer's group."""
    assert client.post("/pause", params={"mode": "keep"}).status_code == 200
    loaded = {"lora_name": "sql-v2", "lora_path": str(client.path)}
    assert client.send_json("load_lora_adapter", **loaded).status_code == 200
    assert client.post("/resume").status_code == 200
    client.answers_and_goes("sql-v2")
    own = in_memory(client.path)
    sent = client.server.engine.adapters.load("sql", **own)
    asyncio.run_coroutine_threadsafe(sent, client.server._loop).result(120)
    client.answers_and_goes()
    sender = WeightSender([client.server.url], port=free_port())
    sender.send_adapter("sql", **own)
    client.answers_and_goes()
    for name, bad, why in (
        ("toy", {}, "is a name of the model"),
        ("a=b", {}, "is no adapter"),
        ("sql", {"config": own["config"] | {"use_dora": True}}, "use_dora=True is not supported"),
        ("sql", {"config": own["config"] | {"r": 4}}, "with the r of 4"),
        ("sql", {"config": None}, "is a mapping of tensors"),
        ("sql", {"tensors": [1]}, "is a mapping of tensors"),
    ):
        with pytest.raises(WeightUpdateError, match=why):
            sender.send_adapter(name, **own | bad)
    begun = {"lora_name": "sql", "lora_config": {"peft_type": "LORA"}}
    for finish, body in (("finish_weight_update", {}), ("finish_lora_update", {"lora_name": "b"})):
        assert client.post("/start_lora_update", json=begun).status_code == 200
        refused = client.post(f"/{finish}", json=body)
        assert refused.status_code == 400
        assert "the update that has begun is of 'sql'" in refused.json()["error"]["message"]
    assert client.names() == ["toy"]
