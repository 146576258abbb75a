"""The process of one engine: cells named as they begin, results and errors as files."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest

from helpers.checkpoints import write_config
from sametoken.bench import session as session_module
from sametoken.bench import sweep_engine
from sametoken.bench.documents import read_json
from sametoken.bench.roofline import Bandwidth
from sametoken.bench.sweep import DONE, FAILED, CellStore
from sametoken.bench.sweep_spec import Sweep
from sametoken.errors import NumericalError


@pytest.fixture
def cells(tmp_path, monkeypatch):
    monkeypatch.setattr(session_module, "read_bandwidth", lambda device: Bandwidth(1e9, "a guess"))
    sweep = Sweep(
        model=(str(write_config(tmp_path / "tiny")),),
        drafter=({"method": "ngram", "num_speculative_tokens": 2},),
        input_len=(4,),
        output_len=(500, 6, 7),
        concurrency=(2,),
        num_iters=2,
        engine={"load_format": "dummy", "device": "cpu"},
    )
    return next(sweep.engines())


def run(monkeypatch, directory, cells):
    job = {"directory": str(directory), "cells": [dataclasses.asdict(cell) for cell in cells]}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(job)))
    return sweep_engine.main()


def test_cells_are_measured_one_by_one(tmp_path, cells, monkeypatch, capsys):
    store = CellStore(tmp_path / "results")
    assert run(monkeypatch, store.directory, cells) == 0
    assert capsys.readouterr().out.splitlines() == [f"begun {cell.name}" for cell in cells]
    assert [store.status(cell) for cell in cells] == [FAILED, DONE, DONE]
    assert "longer than max_model_len=64" in store.error(cells[0])
    found = read_json(store.path(cells[1]))
    (result,) = found["results"]
    assert (result["concurrency"], result["num_tokens"], len(result["runs"])) == (2, 24, 2)
    assert len(result["traces"][0]["token_ids"]) == 6
    assert (found["cell"]["output_len"], found["workload"]["input_len"]) == (6, 4)


def test_an_engine_that_failed_is_not_used_again(tmp_path, cells, monkeypatch):
    def broken(self, *args, **options):
        raise NumericalError("the logits were NaN")

    monkeypatch.setattr(session_module.Session, "run", broken)
    store = CellStore(tmp_path / "results")
    assert run(monkeypatch, store.directory, cells[1:]) == NumericalError.exit_code
    assert "NumericalError: the logits were NaN" in store.error(cells[1])
    assert store.status(cells[2]) is None
