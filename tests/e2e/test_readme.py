"""Commands of README, commands.md and speculative.md run; the file tree is the real one.

So do examples of README, python.md and rollouts.md. The commands and code of the other pages are
parsed, and the files they name exist. README's chart is what its results page gives.

Everything runs in a directory where the names that README uses lead to tiny random
checkpoints, except for the small hybrid, which the repository holds.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
import typer
import yaml
from click import Command, Context
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from helpers import quick_sweep_engine
from helpers.checkpoints import VOCAB, head_tensors, write_llama, write_speculators
from sametoken.bench import roofline, sweep
from sametoken.cli.main import app
from sametoken.config import DEFAULT_MODEL
from sametoken.models.names import HEAD_NAME, HYBRID_NAME

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "sametoken"
README, COMMANDS, SPECULATIVE, FILES, PYTHON = (
    (ROOT / f"{name}.md").read_text(encoding="utf-8")
    for name in ("README", "docs/commands", "docs/speculative", "docs/files", "docs/python")
)
MAX_POSITIONS = 512
AST, AWAIT = ast.PyCF_ONLY_AST, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
#: A path in a folder; pages name it from the root, the package, or their own folder.
NAMED_FILE = re.compile(r"(?<![\w/.<>*$-])\w[\w-]*/[\w/-]+\.(?:py|c|h|md|toml|sh)\b")
#: Pages of old options, and of vLLM's.
NOT_OURS = ("LOG.md", "vllm-flags.md")
#: Options on the other pages that are click's, docker's, pip's, Ray's, twine's and vLLM's.
OTHER_PROGRAMS = {
    *("--help", "--gpus", "--ipc", "--no-deps", "--head", "--strict"),
    "--per-request-spec-decode-metrics",
}
#: Too slow or endless for a test here, and tested by itself; only its options are checked.
NOT_RUN = ("demo", "serve", "batch", "bench serve", "eval")


def blocks(language: str, page: str = README) -> list[str]:
    """Fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def lines_of(language: str, page: str = README) -> list[str]:
    """Lines of fenced blocks, continued ones as one."""
    text = "".join(blocks(language, page)).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip()]


def commands() -> list[list[str]]:
    """The lines of the three pages; those of README first."""
    lines = [line for page in (README, COMMANDS, SPECULATIVE) for line in lines_of("bash", page)]
    return [shlex.split(line) for line in dict.fromkeys(lines)]


SAMETOKEN = [words[1:] for words in commands() if words[0] == "sametoken"]
EXAMPLES = blocks("python")


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory) -> Path:
    """A directory with a tiny checkpoint under every model name that README uses."""
    directory = tmp_path_factory.mktemp("readme")
    for seed, name in enumerate((DEFAULT_MODEL, "path/to/target", "path/to/smaller")):
        write_llama(directory / name, seed, max_position_embeddings=MAX_POSITIONS)
        write_tokenizer(directory / name)
    layer = {"max_position_embeddings": MAX_POSITIONS}
    write_speculators(directory / HEAD_NAME, head_tensors(), layer)
    return directory


def write_tokenizer(directory: Path) -> None:
    words = {f"word{i}": i for i in range(VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="word0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template).save_pretrained(
        directory
    )


def uses_demo_model(arguments: list[str]) -> bool:
    """Whether a command loads the demo model and nothing else."""
    others = any("path/to/" in word or word == HYBRID_NAME for word in arguments)
    return arguments[0] == "generate" and not others


COMMAND: Command = typer.main.get_command(app)


def parsed(arguments: list[str]) -> Context:
    """The command with its arguments, checked by the parser itself, not run."""
    command = COMMAND
    name, rest = "sametoken", list(arguments)
    while hasattr(command, "commands"):
        name, *rest = rest
        command = command.commands[name]
    return command.make_context(name, rest)


def run(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_readme_has_commands_and_examples():
    """The patterns above still find what they look for."""
    assert len(SAMETOKEN) >= 3
    assert any(uses_demo_model(arguments) for arguments in SAMETOKEN)
    assert EXAMPLES


def test_every_command_is_known():
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands():
        assert words[0] in ("make", "sametoken"), f"no check for the command {words[0]!r}"
        if words[0] == "make":
            assert set(words[1:]) <= set(targets), words
    for target in re.findall(r"`make ([a-z-]+)`", README):
        assert target in targets


# In one process and in README's order: what one command writes the next one may read.
@pytest.mark.xdist_group("commands of README")
@pytest.mark.parametrize("arguments", SAMETOKEN, ids=" ".join)
def test_a_command_parses_and_runs(arguments, tiny_models, monkeypatch):
    monkeypatch.chdir(tiny_models)
    # How fast memory is read takes seconds to measure.
    monkeypatch.setattr(roofline, "CPU_BYTES", 1 << 22)
    monkeypatch.setattr(sweep, "_CHILD", quick_sweep_engine.__name__)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    parsed(arguments)
    if not {arguments[0], " ".join(arguments[:2])} & set(NOT_RUN):
        run(arguments)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example, tiny_models, monkeypatch, capsys):
    monkeypatch.chdir(tiny_models)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("example", blocks("python", PYTHON))
def test_an_example_of_the_page_for_python_runs(example, capsys):
    """With a model that has a tokenizer for grammars, and is in the repository."""
    exec(compile(example.replace(DEFAULT_MODEL, HYBRID_NAME), "docs/python.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) > 4


def test_examples_of_the_page_for_trainers_run():
    """The loop and its sleep, in one process as a trainer has them."""
    examples = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
    loop, _, sleep, *_ = blocks("python", examples)
    found = []

    def loss(logprobs, outputs):
        for ours, output in zip(logprobs, outputs, strict=True):
            (answer,) = output.outputs
            pairs = zip(answer.token_ids, answer.logprobs, strict=True)
            found.append(ours.tolist() == [one[token].logprob for token, one in pairs])
        return -sum(map(torch.sum, logprobs))

    names = {"prompts": ["def add(a, b):", "x ="], "loss": loss}
    exec(loop.replace("my-model", HYBRID_NAME).replace("range(100)", "range(2)"), names)
    assert found == [True] * 4
    assert names["llm"].weight_version == 2
    exec(sleep, names)
    assert names["llm"].generate("x =")


def test_an_unknown_option_does_not_pass():
    for command in (["generate"], ["bench", "serve"]):
        with pytest.raises(Exception, match="No such option"):
            parsed([*command, "--no-such-option"])


def real_tree() -> dict[str, str]:
    """Folders at any depth and modules at the top, each with its docstring's first line."""
    found = {f"{path.parent.relative_to(PACKAGE)}/": path for path in PACKAGE.rglob("__init__.py")}
    found.pop("./")
    found |= {path.name: path for path in PACKAGE.glob("*.py")}
    return {name: purpose(path) for name, path in found.items()}


def purpose(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".").replace("``", "`")


def written_tree() -> dict[str, str]:
    (block,) = blocks("tree", FILES)
    root, *lines = block.splitlines()
    assert root == "src/sametoken/"
    found: dict[str, str] = {}
    parents: list[str] = []
    for line in lines:
        name, text = line.split(maxsplit=1)
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        parents[depth:] = [name]
        found["".join(parents)] = text
    return found


def test_the_file_tree_is_the_real_one():
    assert written_tree() == real_tree()


def test_the_chart_is_that_of_the_results(capsys):
    runpy.run_path(str(ROOT / "benchmarks" / "steps" / "readme_chart.py"), run_name="__main__")
    drawn = (ROOT / "docs" / "assets" / "decode-steps.svg").read_text(encoding="utf-8")
    assert capsys.readouterr().out == drawn


def test_the_table_has_the_figures_of_the_results():
    """Those of README's first table, in both engines' rows."""
    beside, law = (
        (ROOT / "benchmarks" / "results" / f"h200-{page}.md").read_text(encoding="utf-8")
        for page in ("beside-vllm", "law-and-tests")
    )
    vllm, ours = re.findall(r"^\| (?:vLLM 0|sametoken).*", README, re.MULTILINE)
    for row in (vllm, ours):
        steps = re.findall(r"[\d.]+ / [\d.]+ / [\d.]+", row)
        assert len(steps) == 2
        assert all(step in beside for step in steps)
        rates = re.findall(r"\d,\d{3}", row)
        assert len(rates) == 2
        assert all(f" {rate.replace(',', '')} |" in beside for rate in rates)
    assert "84 of 197" in vllm
    assert "84 of 197 greedy" in law


FOLDERS = [ROOT / name for name in ("docs", "benchmarks", "models", "src")]
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))]


def test_commands_of_other_pages_parse():
    lines = [line for page in PAGES for line in lines_of(r"\w*", page.read_text(encoding="utf-8"))]
    found = [shlex.split(line)[1:] for line in lines if line.startswith("sametoken ")]
    assert len(found) > len(SAMETOKEN) + 10
    for arguments in found:
        parsed(arguments)


def options_of(command: Command) -> set[str]:
    """The options of a command and of those below it."""
    found = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    return found.union(*map(options_of, getattr(command, "commands", {}).values()))


def test_options_that_pages_name_are_there():
    """``tests/unit/cli/test_vllm_flags.py`` has the page of vLLM's flags."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in NOT_OURS]
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *pages))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert len(named) > 80
    assert named - options_of(COMMAND) == OTHER_PROGRAMS


def test_code_of_every_page_parses_and_what_it_imports_is_there():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    examples = [example for text in texts for example in blocks("python", text)]
    trees = [compile(example, "a page", "exec", AST | AWAIT) for example in examples]
    imports = [node for tree in trees for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) > len(EXAMPLES) + 5
    exec(compile(ast.Module(imports, []), "imports of pages", "exec"), {})
    data = [loaded for text in texts for loaded in map(json.loads, blocks("json", text))]
    data += [loaded for text in texts for loaded in map(yaml.safe_load, blocks("yaml", text))]
    assert len(data) > 1
    assert all(isinstance(loaded, dict) for loaded in data)


def test_every_variable_of_the_environment_is_on_the_page_of_commands():
    sources = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    variables = set(re.findall(r'"(SAMETOKEN_[A-Z_]+)"', "".join(sources)))
    assert len(variables) > 2
    assert all(f"`{name}`" in COMMANDS for name in variables)


def anchors(page) -> set[str]:
    """What a page's headings are called in links to them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    spelled = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in spelled}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_files_that_pages_name_are_there():
    """Those of the log were there when it was written."""
    named = [
        (page, name)
        for page in PAGES
        if page.name != "LOG.md"
        for name in NAMED_FILE.findall(page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 500
    folders = (ROOT, PACKAGE, PACKAGE / "serving" / "http", ROOT / "tests/gpu", ROOT / "benchmarks")
    missing = [
        f"{page.name}: {name}"
        for page, name in named
        if not any((folder / name).exists() for folder in (page.parent, *folders))
    ]
    assert missing == []
