"""What training, benchmarks and audits read: a file that is not what it should be is named."""

from __future__ import annotations

import gzip
import json
import threading
import zipfile
from dataclasses import replace

import httpx
import pytest
import torch
from torch import nn

from helpers.bench_engine import document
from sametoken.audit.servers import _post, parse_completion
from sametoken.bench.comparison import compare_runs
from sametoken.bench.datasets import load_dataset
from sametoken.bench.documents import read_json, render_report, write_json
from sametoken.bench.openai_stream import Endpoint, ServedRequest, send
from sametoken.bench.sweep_spec import drafter_of
from sametoken.bench.workload import Server
from sametoken.bench.workload import read_prompts as read_bench_prompts
from sametoken.errors import CheckpointError, ConfigError, RequestError
from sametoken.train.acceptance import Acceptance
from sametoken.train.corpus import Source
from sametoken.train.generate import read_prompts
from sametoken.train.lm import train_lm
from sametoken.train.loop import CHECKPOINT, run_loop
from sametoken.train.options import LMOptions, LoopOptions
from sametoken.train.progress import StepLoss
from sametoken.train.text import read_sequences
from sametoken.train.tokenizer import load_trained_tokenizer

NESTED = b"[" * 100_000 + b"]" * 100_000
LONG_NUMBER = b"9" * 5000


def encode(messages) -> list[int]:
    return [ord(c) % 64 for message in messages for c in f"{message['role']}{message['content']}"]


def as_text(path):
    return read_sequences(path, vocab_size=64, max_length=50, encode=encode)


def as_documents(path):
    return Source(path, 1.0).documents()


def as_bench_prompts(path):
    return read_bench_prompts(path, lambda text: [ord(c) for c in text], 128)


def as_dataset(path):
    return load_dataset("custom", path=path)


READERS = {
    "text": (as_text, b'{"prompt": "a", "answer": "bc"}'),
    "documents": (as_documents, b'{"text": "a"}'),
    "prompts": (read_prompts, b'{"prompt": "a"}'),
    "bench prompts": (as_bench_prompts, b'{"prompt": "a"}'),
    "dataset": (as_dataset, b'{"prompt": "a"}'),
}
every_reader = pytest.mark.parametrize(("read", "good"), READERS.values(), ids=READERS)
BAD_LINES = {
    "nested": NESTED,
    "nested in an object": b'{"prompt": ' + NESTED + b"}",
    "long number": b'{"prompt": ' + LONG_NUMBER + b"}",
    "half a pair": rb'{"prompt": "\ud800", "answer": "x"}',
    "not UTF-8": b'{"prompt": "\xff", "answer": "x"}',
    "zero bytes": b"\0" * 40,
    "no number": b'{"prompt": "a", "answer": "b", "temperature": NaN}',
    "an empty list": b"[]",
    "a number": b"5",
    "true": b"true",
    "nothing": b"null",
    "a number for a prompt": b'{"prompt": 5, "answer": "x", "text": 5}',
    "a list for a prompt": b'{"prompt": ["a"], "answer": ["x"], "text": ["y"]}',
    "nothing for a prompt": b'{"prompt": null, "answer": null, "text": null}',
    "messages that are a text": b'{"messages": "hello"}',
    "messages that are texts": b'{"messages": ["hello"]}',
    "messages without content": b'{"messages": [{"role": "user"}]}',
    "a number for content": b'{"messages": [{"role": "user", "content": 5}]}',
    "ids that are text": b'{"prompt_token_ids": "12", "output_token_ids": "34"}',
    "ids that are true": b'{"prompt_token_ids": [true], "output_token_ids": [true, true]}',
    "ids that are fractions": b'{"prompt_token_ids": [1.5], "output_token_ids": [1.5, 2.5]}',
}


@every_reader
@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named(tmp_path, read, good, line):
    path = tmp_path / "data.jsonl"
    path.write_bytes(good + b"\n\n" + line + b"\n" + good)
    with pytest.raises(ConfigError, match=r"line 3 of .*data\.jsonl"):
        read(path)


@every_reader
def test_a_file_that_cannot_be_read_is_named(tmp_path, read, good):
    broken = bytearray(gzip.compress(good * 100))
    broken[15] ^= 0xFF
    files = {
        "folder.jsonl": None,
        "none.jsonl": None,
        "empty.jsonl": b"",
        "blank.jsonl": b"\n \n",
        "utf16.jsonl": good.decode().encode("utf-16"),
        "mark.jsonl": b"\xef\xbb\xbf" + good,
        "no-archive.jsonl.gz": good,
        "cut.jsonl.gz": gzip.compress(good * 100)[:-9],
        "broken.jsonl.gz": bytes(broken),
    }
    (tmp_path / "folder.jsonl").mkdir()
    for name, data in files.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=name):
            read(tmp_path / name)


@every_reader
def test_an_archive_of_one_endless_line_is_given_up(tmp_path, read, good, monkeypatch):
    monkeypatch.setattr("sametoken.io.json_text.MAX_LINE_BYTES", 10**6)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b"[" * 10**7, compresslevel=1))
    with pytest.raises(ConfigError, match=r"line 1 of .* has more than 1000000 bytes"):
        read(path)


def test_a_conversation_that_ends_with_its_user_is_no_answer(tmp_path):
    path = tmp_path / "t.jsonl"
    turns = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "train on me"}]
    path.write_text(json.dumps({"messages": turns}))
    with pytest.raises(ConfigError, match="the last message is not the assistant's"):
        as_text(path)


def test_a_prompt_with_impossible_settings_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    for settings in ({"temperature": "hot"}, {"temperature": -1}, {"seed": 1.5}, {"seed": [1]}):
        path.write_text(json.dumps({"prompt": "a"} | settings))
        with pytest.raises(ConfigError, match=f"line 1 of .*{next(iter(settings))}"):
            read_prompts(path)


def test_a_text_without_a_word_is_no_corpus(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "empty.jsonl").write_text('""\n{"text": ""}\n')
    for name in ("empty.txt", "empty.jsonl"):
        with pytest.raises(ConfigError, match=f"{name} holds no documents"):
            as_documents(tmp_path / name)


class Fit:
    """Something to train that a checkpoint can be of."""

    def __init__(self) -> None:
        self.network = nn.Linear(2, 3)

    def loss(self, step: int) -> StepLoss:
        x = torch.randn(8, 2, generator=torch.Generator().manual_seed(step))
        none = Acceptance.none(2, torch.device("cpu"))
        return StepLoss(self.network(x).square().mean(), none)


OPTIONS = {"steps": 4, "warmup_steps": 2, "checkpoint_every": 2}


def train(output, **changes) -> Fit:
    fit = Fit()
    chosen = LoopOptions(**(OPTIONS | changes))
    run_loop(fit, chosen, output, lambda now: None, identity={"text": "t"}, began=0.0)
    return fit


def changed(path: str, value):
    def change(state):
        *way, last = path.split("/")
        place = state
        for key in way:
            place = place[int(key) if key.isdigit() else key]
        if value is None:
            del place[last]
        else:
            place[last] = value
        return state

    return change


STATES = {
    "a list": lambda state: [],
    "a list of it": lambda state: [state],
    "a tensor": lambda state: torch.zeros(3),
    "nothing": lambda state: None,
    "no identity": changed("identity", None),
    "an identity that is a list": changed("identity", ["text"]),
    "no step": changed("step", None),
    "a step that is a text": changed("step", "2"),
    "a step past the end": changed("step", 5),
    "a step before the first": changed("step", -1),
    "no network": changed("network", None),
    "no sums": changed("meter", None),
    "sums that are a list": changed("meter", [1]),
    "sums of another shape": changed(
        "meter", {"offered": torch.zeros(2), "accepted": torch.zeros(3)}
    ),
    "a network that is a list": changed("network", [1]),
    "a tensor of another shape": changed("network/weight", torch.zeros(9, 9)),
    "a tensor that is a number": changed("network/weight", 5),
    "a tensor less": changed("network/weight", None),
    "a tensor more": changed("network/more", torch.zeros(1)),
    "no optimizer": changed("optimizer", None),
    "an optimizer without state": changed("optimizer/state", {}),
    "an optimizer that is a list": changed("optimizer", []),
    "a moment of another shape": changed("optimizer/state/0/exp_avg", torch.zeros(7)),
    "a moment less": changed("optimizer/state/0/exp_avg_sq", None),
    "a noise of another size": changed("rng", torch.zeros(3, dtype=torch.uint8)),
    "no noise": changed("rng", None),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, change):
    train(tmp_path)
    path = tmp_path / CHECKPOINT
    torch.save(change(torch.load(path, weights_only=True)), path)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt cannot be read"):
        train(tmp_path, resume=True)


def test_a_checkpoint_that_was_cut_edited_or_packed_is_refused(tmp_path):
    train(tmp_path)
    path = tmp_path / CHECKPOINT
    whole = path.read_bytes()
    packed = tmp_path / "packed"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as to:
        for name in archive.namelist():
            to.writestr(name, archive.read(name))
    for data in (b"", whole[: len(whole) // 2], b"\x80\x02]q\x00.", NESTED, packed.read_bytes()):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"checkpoint\.pt cannot be read"):
            train(tmp_path, resume=True)


class Touch:
    """Runs a command when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return (type(self.path).touch, (self.path,))


def test_a_checkpoint_runs_no_code(tmp_path):
    torch.save({"format": Touch(tmp_path / "touched")}, tmp_path / CHECKPOINT)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt cannot be read"):
        train(tmp_path, resume=True)
    assert not (tmp_path / "touched").exists()


def test_a_tokenizer_that_is_none_is_refused(tmp_path):
    for data in (b"", b"[]", b"{}", NESTED, b"\xff"):
        (tmp_path / "tokenizer.json").write_bytes(data)
        with pytest.raises(CheckpointError, match="no tokenizer that can be read"):
            load_trained_tokenizer(tmp_path)


def test_two_trainings_do_not_share_a_folder(tmp_path):
    """The second is refused while the first reads its text, before either has written."""
    text, output = tmp_path / "t.txt", tmp_path / "out"
    text.write_text("a b c d " * 200)
    loop = LoopOptions(steps=1, warmup_steps=1, batch_tokens=64, max_length=32, device="cpu")
    options = LMOptions(
        architecture="llama",
        vocab_size=260,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
    )
    refused = []

    def run(announce, resume=False):
        quiet = {"report": lambda now: None, "announce": announce}
        chosen = replace(loop, resume=resume)
        return train_lm(output, [Source(text, 1.0)], options, chosen, **quiet)

    def run_another(line: str) -> None:
        if not refused:
            refused.append(None)
            with pytest.raises(ConfigError, match="is held by process") as caught:
                run(lambda line: None)
            refused[0] = caught.value

    thread = threading.Thread(target=run, args=(run_another,))
    thread.start()
    thread.join(60)
    assert "training" in refused[0].remedy
    assert run(lambda line: None, resume=True).steps == 1


RESULTS = {
    "results that are an object": {"results": {"a": 1}},
    "results that are a number": {"results": 5},
    "a result that is a number": {"results": [5]},
    "a result without numbers": {"results": [{}]},
    "an environment that is a list": {"environment": [1]},
    "settings that are a list": {"settings": []},
    "an error of no cell": {"error": "x", "cell": 5},
    "a drafter without a method": {"error": "x", "cell": {"speculative_config": {"k": 1}}},
    "synthetic that is a number": {"synthetic": 5},
}


@pytest.mark.parametrize("change", RESULTS.values(), ids=RESULTS)
def test_a_result_of_something_else_is_no_measurement(tmp_path, change):
    write_json(tmp_path / "a.json", document() | change)
    with pytest.raises(ConfigError, match=r"a\.json, is no measurement"):
        compare_runs([tmp_path / "a.json"])


@pytest.mark.parametrize("value", ["<b>1</b>", [1], {}, True, 10**400])
def test_a_number_that_is_none_is_no_measurement(tmp_path, value):
    run = document()
    run["results"][0]["tokens_per_second"] = value
    write_json(tmp_path / "a.json", run)
    with pytest.raises(ConfigError, match="is no number"):
        compare_runs([tmp_path / "a.json"])


@pytest.mark.parametrize("data", [NESTED, LONG_NUMBER, b'{"a": NaN}', b"\xff", b'{"a": "\\ud800"}'])
def test_json_that_is_none_is_named(tmp_path, data):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.json cannot be read as JSON"):
        read_json(tmp_path / "a.json")


def test_names_in_a_report_are_texts(tmp_path):
    run, evil = document(), "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    run["settings"]["asked"]["model"] = f"a/{evil}"
    run["benchmark"] = evil
    write_json(tmp_path / "a.json", run)
    page = render_report(evil, compare_runs([tmp_path / "a.json"], [evil]))
    assert "<script>alert" not in page
    assert "<img" not in page
    assert page.count("</script>") == 3


def test_nested_options_are_refused():
    for text in (NESTED.decode(), '{"a": ' + "9" * 5000 + "}", "[]"):
        with pytest.raises(ConfigError, match="no JSON object"):
            Server(url="http://host", extra_body=text)
        with pytest.raises(ConfigError, match="no JSON object"):
            drafter_of(text)


@pytest.mark.parametrize(
    "top", [[{"a": "x"}], [{"a": [1]}], [5], ["text"], 5, [{"a": None, "b": 1}], [{"a": 10**400}]]
)
def test_an_audited_server_s_numbers_are_numbers(top):
    choice = {"logprobs": {"tokens": ["a"], "top_logprobs": top}, "text": "a"}
    with pytest.raises(RequestError, match="no log-probabilities"):
        parse_completion({"choices": [choice]})


async def test_a_server_s_nested_answer_is_no_answer():
    """One that is audited, and one that is measured: an error of that request alone."""
    event = b"data: " + NESTED + b"\n\n"

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=event if request.url.path == "/stream" else NESTED)

    record = ServedRequest(0, 0.0)
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
        await send(client, Endpoint("/stream", "m", False), {}, record)
        with pytest.raises(RequestError, match="answered no JSON"):
            await _post(client, {})
    assert "an event is not as OpenAI has it" in record.error
