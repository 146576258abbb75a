"""Cheap imports: the command's help, the host's vocabulary and serving never load torch.

Clients of servers do not either (``tests/e2e/test_bench_serve.py``, ``test_audit_servers.py``).
"""

from __future__ import annotations

import ast
import tomllib

import pytest

import sametoken
from helpers.chat_model import save_tokenizer
from helpers.commands import MODULES_AFTER, run_command, run_python
from helpers.sources import PACKAGE, package_sources, parsed
from sametoken.models.registry import ARCHITECTURES

HEAVY = ("torch", "triton", "transformers", "tokenizers", "gguf", "numpy", "fastapi", "uvicorn")


def light_modules() -> list[str]:
    """Every module of the layers that stay on the host."""
    names = ["sametoken", "sametoken.config", "sametoken.errors"]
    for folder in ("types", "scheduler", "io"):
        for path in sorted((PACKAGE / folder).glob("*.py")):
            stem = "" if path.stem == "__init__" else f".{path.stem}"
            names.append(f"sametoken.{folder}{stem}")
    return names


def test_host_modules_load_nothing_heavy():
    imports = "".join(f"import {name}\n" for name in light_modules())
    assert run_python(imports + MODULES_AFTER.format(heavy=HEAVY)).strip() == "[]"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["generate", "--help"], ["serve", "--help"]]
)
def test_help_loads_nothing_heavy(arguments):
    shown, loaded = run_command(arguments, HEAVY)
    assert loaded == []
    assert "sametoken" in shown


def test_the_serving_process_loads_no_tensors(tmp_path):
    """With requests it is held to that by tests/e2e/test_server_command.py."""
    code = (
        "from pathlib import Path\n"
        "import sametoken.serving.batch.on_ray, sametoken.serving.http.run\n"
        "from sametoken.text.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer(Path({str(save_tokenizer(tmp_path))!r}))\n"
        "prompt = tokenizer.apply_chat_template([{'role': 'user', 'content': 'the cat'}])\n"
        "assert tokenizer.decode(tokenizer.encode(prompt), skip_special_tokens=False) == prompt\n"
    )
    heavy = ("torch", "triton", "xgrammar")
    assert run_python(code + MODULES_AFTER.format(heavy=heavy)).strip() == "[]"


def test_every_architecture_is_in_the_contract_that_they_do_not_know_each_other():
    settings = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (modules,) = (one["modules"] for one in contracts if one["type"] == "independence")
    assert modules == sorted({model.__module__ for model in ARCHITECTURES.values()})


def exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def in_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: the order that ruff keeps (RUF022)."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_all_is_sorted_and_complete():
    tree = parsed((PACKAGE / "__init__.py").read_text())
    names = exported(tree)
    assert names == sorted(names, key=in_order)
    imported = [
        alias.asname or alias.name
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(imported) == sorted(names)
    assert sorted(sametoken._HOMES) == sorted(names)


def test_every_exported_name_is_there():
    for name in sametoken.__all__:
        assert getattr(sametoken, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sametoken.nothing


def test_other_modules_that_export_do_so_in_order():
    for path, source in package_sources().items():
        names = exported(parsed(source))
        if names is not None:
            assert names == sorted(names, key=in_order), path
