"""``sametoken quantize``: a copy on disk, and errors with an exit code."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from helpers.checkpoints import write_llama
from sametoken.cli.main import app


def test_the_command_writes_a_copy(tmp_path):
    source = write_llama(tmp_path / "source")
    done = CliRunner().invoke(app, ["quantize", str(source), str(tmp_path / "out")])
    assert done.exit_code == 0
    assert "28 linears in fp8-dynamic" in done.stdout
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "float-quantized"


def test_errors_are_one_line(tmp_path):
    source = write_llama(tmp_path / "source")
    done = CliRunner().invoke(app, ["quantize", str(source), str(source)])
    assert done.exit_code == 2
    assert "exists. name a new directory" in done.stderr
