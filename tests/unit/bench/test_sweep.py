"""Sweeps go on where they ended, and a process that dies takes one cell with it."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from sametoken.bench import sweep
from sametoken.bench.documents import write_json
from sametoken.bench.sweep import DONE, FAILED, CellStore, launch_engine, run_sweep
from sametoken.bench.sweep_spec import Sweep
from sametoken.errors import ConfigError

SWEEP = Sweep(model=("m",), output_len=(1, 2, 3), drafter=(None, {"method": "ngram"}))


class FakeEngine:
    """Finishes every cell but those whose output length it fails or dies at."""

    def __init__(self, fails=(), dies=(), broken=False) -> None:
        self.fails, self.dies, self.broken = fails, dies, broken
        self.launches, self.measured = 0, []

    def __call__(self, directory, cells):
        self.launches += 1
        store = CellStore(directory)
        if self.broken:
            return None, "exited with 1: no such model"
        for cell in cells:
            if cell.output_len in self.dies:
                return cell.name, "ended by SIGKILL"
            if cell.output_len in self.fails:
                store.fail(cell, "does not fit")
                continue
            self.measured.append(cell.name)
            store.finish(cell, {"results": [{"tokens_per_second": 1.0}]})
        return cells[-1].name, ""


def run(directory, engine, planned=SWEEP, **options):
    told = []
    with patch.object(sweep, "launch_engine", engine):
        counts = run_sweep(planned, directory, announce=told.append, **options)
    return counts, told


def test_a_finished_cell_is_not_measured_again(tmp_path):
    first, again = FakeEngine(), FakeEngine()
    assert run(tmp_path, first)[0] == {DONE: 6, FAILED: 0}
    assert (first.launches, len(set(first.measured))) == (2, 6)
    counts, told = run(tmp_path, again)
    assert counts == {DONE: 6, FAILED: 0}
    assert (again.launches, again.measured) == (0, [])
    assert told[0] == "m, plain, TP 1: 0 of 3 cells to measure"


def test_no_two_engines_are_announced_alike(tmp_path):
    heads = [{"method": "eagle3", "model": f"{name}/head"} for name in ("a/one", "b/two")]
    planned = replace(SWEEP, drafter=(*heads, {**heads[0], "token_map": "ids.json"}))
    _, told = run(tmp_path, FakeEngine(), planned)
    assert [line.split(", ")[1] for line in told] == [
        "eagle3 one/head (1)",
        "eagle3 two/head",
        "eagle3 one/head (2)",
    ]


def test_a_sweep_that_was_cut_goes_on(tmp_path):
    class Interrupted(FakeEngine):
        def __call__(self, directory, cells):
            super().__call__(directory, cells[:2])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Interrupted())
    rest = FakeEngine()
    assert run(tmp_path, rest)[0] == {DONE: 6, FAILED: 0}
    assert len(rest.measured) == 4


def test_a_second_sweep_does_not_measure_beside_the_first(tmp_path):
    class Disturbed(FakeEngine):
        def __call__(self, directory, cells):
            with pytest.raises(ConfigError, match="is held by process"):
                run(tmp_path, FakeEngine())
            return super().__call__(directory, cells)

    assert run(tmp_path, Disturbed())[0] == {DONE: 6, FAILED: 0}


def test_a_process_that_dies_takes_its_cell_and_no_other(tmp_path):
    engine = FakeEngine(dies=(2,))
    counts, told = run(tmp_path, engine)
    assert counts == {DONE: 4, FAILED: 2}
    assert engine.launches == 4
    assert sum("ended by SIGKILL" in line for line in told) == 2


def test_failed_cells_are_told_and_measured_again_only_if_asked(tmp_path):
    counts, told = run(tmp_path, FakeEngine(fails=(3,)))
    assert counts == {DONE: 4, FAILED: 2}
    assert any("out3" in line and "does not fit" in line for line in told)
    same, better = FakeEngine(), FakeEngine()
    assert run(tmp_path, same)[0] == {DONE: 4, FAILED: 2}
    assert same.launches == 0
    assert run(tmp_path, better, retry_failed=True)[0] == {DONE: 6, FAILED: 0}
    assert len(better.measured) == 2


def test_an_engine_that_does_not_start_fails_all_its_cells_once(tmp_path):
    engine = FakeEngine(broken=True)
    assert run(tmp_path, engine)[0] == {DONE: 0, FAILED: 6}
    assert engine.launches == 2
    store = CellStore(tmp_path)
    assert "no such model" in store.error(next(SWEEP.engines())[0])


def test_a_file_of_another_cell_is_not_taken_for_a_result(tmp_path):
    cell = next(SWEEP.engines())[0]
    write_json(CellStore(tmp_path).path(cell), {"cell": {}, "status": DONE})
    with pytest.raises(ConfigError, match="belongs to another cell"):
        run(tmp_path, FakeEngine())
    CellStore(tmp_path).path(cell).write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        run(tmp_path, FakeEngine())


def test_a_process_that_cannot_begin_says_why(tmp_path):
    cells = next(Sweep(model=("m",)).engines())
    cells = [replace(one, engine={**one.engine, "dtype": "int3"}) for one in cells]
    begun, error = launch_engine(tmp_path, cells)
    assert begun is None
    assert "the engine's process ended with exit status 2: " in error
    assert "dtype='int3' is not possible" in error


def test_a_process_that_ends_before_it_reads_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr("sametoken.bench.sweep._CHILD", "sametoken.no_such_module")
    # More than a pipe holds.
    cells = next(Sweep(model=("m",)).engines()) * 1000
    begun, error = launch_engine(tmp_path, cells)
    assert begun is None
    assert "ended with exit status 1: " in error
    assert "No module named" in error
