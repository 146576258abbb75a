"""``sametoken quantize``: a copy on disk, and errors with an exit code."""

from __future__ import annotations

import json

from safetensors import SafetensorError

from helpers.checkpoints import write_llama
from helpers.cli import invoke
from sametoken.models import safetensors_file


def test_the_command_writes_a_copy(tmp_path):
    source = write_llama(tmp_path / "source")
    done = invoke("quantize", source, tmp_path / "out")
    assert done.exit_code == 0
    assert "28 linears in fp8-dynamic" in done.stdout
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "float-quantized"


def test_a_copy_that_cannot_be_written_leaves_nothing_and_is_one_line(tmp_path, monkeypatch):
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"

    def fail(*given, **named):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors_file, "save_file", fail)
    done = invoke("quantize", source, out)
    assert (done.exit_code, done.stderr.count("\n"), out.exists()) == (2, 1, False)
    assert "out cannot be written (No space left on device). Make room" in done.stderr
    (tmp_path / "named").mkdir()
    out.symlink_to(tmp_path / "named")
    done = invoke("quantize", source, out)
    assert (done.exit_code, out.exists()) == (2, False)
    (tmp_path / "file").write_text("")
    done = invoke("quantize", source, tmp_path / "file" / "out")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)


def test_models_are_found_by_name_and_files_are_refused(tmp_path):
    out = str(tmp_path / "out")
    done = invoke("quantize", "no-such-model", out)
    assert "'no-such-model' is neither a path, a short name nor a hub id" in done.stderr
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    done = invoke("quantize", file, out)
    assert done.exit_code == 3
    assert "is a file, and quantizing reads Hugging Face directories" in done.stderr


def test_an_output_that_is_there_is_refused_before_the_model_is_looked_up(tmp_path):
    (tmp_path / "link").symlink_to("nothing")
    for there in (tmp_path, tmp_path / "link"):
        done = invoke("quantize", "no-such-model", there)
        assert done.exit_code == 2
        assert "exists. Name a new directory" in done.stderr
