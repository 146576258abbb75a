"""The wheel: what it carries, its size, and its work away from the checkout without a compiler."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sametoken
from helpers.chat_model import write_chat_model

ROOT = Path(__file__).parents[2]
MAX_BYTES = 20_000_000
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")
NAMED = re.compile(r"^\| (`sametoken[/-][^|]*) \|", re.MULTILINE)

PROGRAM = """
import json, sys
from pathlib import Path
import sametoken
from sametoken import LLM, SamplingParams
from sametoken.bench.datasets import load_dataset

from sametoken.models.names import CHECKOUT_NAMES, HEAD_DIRECTORY, in_checkout
from sametoken.serving.http.pages import page_assets, page_routes

params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
tokens = []
for speculation in (None, {"method": "ngram", "num_speculative_tokens": 4}):
    llm = LLM(sys.argv[1], speculative_config=speculation)
    tokens.append(llm.generate(["the inner the other the"], params)[0].outputs[0].token_ids)
print(json.dumps({
    "place": sametoken.__file__,
    "tokens": tokens,
    "head": (HEAD_DIRECTORY / "model.safetensors").is_file(),
    "hybrids": [name for name in CHECKOUT_NAMES if in_checkout(name)],
    "questions": len(load_dataset("gsm8k", limit=3)),
    "pages": len([*page_routes().routes, page_assets()]),
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that the checkout stays as it is."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    build = "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(out)], cwd=source, check=True, capture_output=True
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.mark.network
def test_the_constraints_have_the_triton_of_pytorch_for_gpus(tmp_path):
    # PyTorch for CPUs requires none. Of the containers' Python, whichever runs the tests.
    report = tmp_path / "report.json"
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    other = ["--python-version", "3.12", "--only-binary", ":all:", "--target", str(tmp_path)]
    pinned = ["--no-deps", "-c", str(ROOT / "constraints.txt"), "torch"]
    command = [*pip, *other, *pinned, "--report", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (torch,) = json.loads(report.read_text())["install"]
    required = [one.partition(";")[0] for one in torch["metadata"]["requires_dist"]]
    (triton,) = (one for one in required if one.startswith("triton=="))
    assert triton in (ROOT / "constraints.txt").read_text().splitlines()


def test_its_files_are_those_of_the_table_and_it_is_small(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    code = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == code
    table = (ROOT / "docs" / "packaging.md").read_text("utf-8")
    patterns = [one for row in NAMED.findall(table) for one in re.findall("`([^`]+)`", row)]
    surprises = [name for name in names - code if not matching(name, patterns)]
    assert surprises == []
    assert [one for one in patterns if not any(matching(name, [one]) for name in names)] == []
    assert wheel.stat().st_size < MAX_BYTES
    assert [name for name in names if name.endswith(".safetensors")] == [
        "sametoken/heads/smollm2_eagle3/model.safetensors"
    ]


def matching(name: str, patterns: list[str]) -> bool:
    """Whether a pattern names the file; ``**`` crosses folders, ``*`` does not."""
    return any(
        fnmatch.fnmatch(name, one) and ("**" in one or name.count("/") == one.count("/"))
        for one in patterns
    )


def test_one_version():
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {sametoken.__version__}\n" in citation
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert headings[0] == "Unreleased"
    assert headings[1:2] in ([], [sametoken.__version__])


def test_it_works_away_from_the_checkout_and_without_a_compiler(wheel, tmp_path):
    place, home = tmp_path / "installed", tmp_path / "home"
    home.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    assert wheel.name.split("-")[1] == sametoken.__version__
    result = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(write_chat_model(tmp_path / "model"))],
        cwd=home,
        env={"PATH": str(home), "HOME": str(home), "PYTHONPATH": str(place)}
        | {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert Path(found["place"]).is_relative_to(place)
    assert found["tokens"][0] == found["tokens"][1]
    assert len(found["tokens"][0]) == 24
    assert (found["head"], found["hybrids"], found["questions"]) == (True, [], 3)
    assert found["pages"] == 3
    assert "no C compiler found" in result.stderr
    assert "Falling back to the reference kernels" in result.stderr
    assert not list(home.rglob("*.so"))
