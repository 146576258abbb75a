"""``benchmarks/steps/host_time.py``: every function of the table runs, and has time of its own."""

from __future__ import annotations

import re

from helpers.checkpoints import write_llama
from helpers.scripts import imported


def test_every_part_takes_time(tmp_path, monkeypatch, capsys):
    model = write_llama(tmp_path / "model", max_position_embeddings=64, vocab_size=1000)
    with imported("steps", "host_time") as modules:
        script = modules.host_time
        monkeypatch.setattr(script, "OUTPUT", 6)
        monkeypatch.setattr(script, "PROMPT", 4)
        for owner, name in script.PARTS:
            # It stays as it is after this test.
            monkeypatch.setattr(owner, name, vars(owner)[name])
        script.main([str(model), "3", "--device", "cpu"])
        names = [name for _, name in script.PARTS]
    shown = re.findall(r"^ *([\d.]+) us  (\w+)$", capsys.readouterr().out, re.MULTILINE)
    times = {name: float(microseconds) for microseconds, name in shown}
    assert list(times) == [*names, "all"]
    assert min(times.values()) > 0
    assert times["all"] >= sum(times[name] for name in names) - 0.1
