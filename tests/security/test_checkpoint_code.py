"""Code that comes with a checkpoint is never run, and chat templates come to an end."""

from __future__ import annotations

import ast
import json
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from helpers.checkpoints import change_config, write_llama
from helpers.sources import PACKAGE, nodes_of
from sametoken import LLM
from sametoken.errors import RequestError, SametokenError, UnsupportedError
from sametoken.text.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]
#: Between one user's own processes, over a socket pair that nobody else has.
PICKLES = {"io/child_process.py"}


class Unread:
    """Standard input that nobody may ask."""

    def __getattr__(self, name: str):
        raise AssertionError(f"standard input was asked: {name}")


def with_code(folder: Path) -> Path:
    """A Llama; a marker appears beside its files as soon as its Python file is imported."""
    directory = write_llama(folder / "llama")
    code = f"open({str(directory / 'marker')!r}, 'w').close()\nclass Theirs:\n    pass\n"
    (directory / "theirs.py").write_text(code)
    auto_map = {"AutoTokenizer": ["theirs.Theirs", None], "AutoConfig": "theirs.Theirs"}
    settings = {"tokenizer_class": "Theirs", "auto_map": auto_map}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("load", [load_tokenizer, lambda path: LLM(model=str(path))])
def test_a_tokenizer_that_is_code_is_refused_and_nothing_asked(tmp_path, monkeypatch, load):
    directory = with_code(tmp_path)
    monkeypatch.setattr(sys, "stdin", Unread())
    with pytest.raises(UnsupportedError, match="never run"):
        load(directory)
    assert not (directory / "marker").exists()


def test_a_config_that_is_code_is_never_run(tmp_path, monkeypatch):
    directory = with_code(tmp_path)
    auto_map = {"AutoConfig": "theirs.Theirs", "AutoTokenizer": "theirs.Theirs"}
    change_config(directory, model_type="theirs", auto_map=auto_map)
    (directory / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(sys, "stdin", Unread())
    with pytest.raises(SametokenError):
        load_tokenizer(directory)
    assert not (directory / "marker").exists()


def calls(path: Path) -> list[tuple[str, dict[str, object]]]:
    """Dotted name of every call in a file, with its keywords that are constants."""
    found = []
    for node in nodes_of(path.read_text()):
        if isinstance(node, ast.Call):
            keywords = {
                k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)
            }
            found.append((dotted(node.func), keywords))
    return found


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of such an expression; of another one its end."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def runs_code(name: str, keywords: dict[str, object]) -> bool:
    """Whether a call may run what a file says."""
    module, _, function = name.rpartition(".")
    if function == "from_pretrained":
        return keywords.get("trust_remote_code") is not False
    if name == "torch.load":
        return keywords.get("weights_only") is not True
    if name in ("np.load", "numpy.load"):
        return keywords.get("allow_pickle", False) is not False
    if module in ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"):
        return function in ("load", "loads", "open", "Unpickler")
    return name in ("eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load")


def wrong_calls(directory: Path) -> set[str]:
    return {
        f"{path.relative_to(directory)}: {name}"
        for path in directory.rglob("*.py")
        for name, keywords in calls(path)
        if runs_code(name, keywords)
    }


# Other tests of this group have parsed the sources.
@pytest.mark.xdist_group("architecture")
def test_no_call_runs_what_a_file_says():
    assert wrong_calls(PACKAGE) == {f"{name}: pickle.loads" for name in PICKLES}
    assert wrong_calls(ROOT / "benchmarks") == set()


@pytest.mark.xdist_group("architecture")
def test_no_test_loads_code():
    assert not [call for call in wrong_calls(ROOT / "tests") if call.endswith("from_pretrained")]


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        ("AutoTokenizer.from_pretrained(path)", True),
        ("AutoTokenizer.from_pretrained(path, trust_remote_code=True)", True),
        ("AutoTokenizer.from_pretrained(path, trust_remote_code=False)", False),
        ("torch.load(path)", True),
        ("torch.load(path, weights_only=True)", False),
        ("np.load(path, allow_pickle=True)", True),
        ("pickle.loads(data)", True),
        ("yaml.load(text)", True),
        ("yaml.safe_load(text)", False),
        ("eval(text)", True),
        ("model.eval()", False),
    ],
)
def test_calls_that_run_code_are_found(tmp_path, call, wrong):
    (tmp_path / "code.py").write_text(call)
    ((name, keywords),) = calls(tmp_path / "code.py")
    assert runs_code(name, keywords) == wrong


def templated(template: str) -> Tokenizer:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template))


MESSAGES = [{"role": "user", "content": "hello"}]
ENDLESS = {
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
    "loops in loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a recursive macro": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a tree of calls": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_is_stopped_and_the_next_one_renders(template):
    began = time.monotonic()
    with pytest.raises(RequestError, match="the chat template refuses the messages"):
        templated(template).apply_chat_template(MESSAGES)
    assert time.monotonic() - began < 60
    rest = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert templated(rest).apply_chat_template(MESSAGES) == "hello"


@pytest.mark.parametrize(
    "expression",
    ["''.__class__.__base__.__subclasses__()", "cycler.__init__.__globals__", "messages.append(1)"],
)
def test_a_template_reaches_nothing_outside_its_sandbox(expression):
    with pytest.raises(RequestError, match="the chat template refuses"):
        templated("{{ " + expression + " }}").apply_chat_template(MESSAGES)
