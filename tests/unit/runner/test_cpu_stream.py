"""Threads of a CPU's steps: all of them, or one while other processes take the cores."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest
import torch

from sametoken.runner import cpu_stream
from sametoken.runner.cpu_stream import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MEASURED_S,
    STARVED,
    STARVED_SPINNING,
    CpuStream,
)


class Machine:
    """A process whose steps take some time, and get some cores while they run."""

    def __init__(self):
        self.wall = self.cpu = 0.0
        self.threads = []

    def step(self, stream, *, cores, seconds=2 * MEASURED_S):
        """The number of threads that the step ran on."""

        def work():
            self.threads.append(torch.get_num_threads())
            self.wall += seconds
            self.cpu += cores * seconds

        stream.submit(work).wait()
        return self.threads[-1]


@pytest.fixture(autouse=True)
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def stream(machine):
    return CpuStream(64, lambda: machine.wall, lambda: machine.cpu, STARVED)


def test_all_threads_run_while_the_process_has_its_cores(machine, stream):
    assert {machine.step(stream, cores=3.5) for _ in range(9)} == {4}


def test_no_more_threads_run_than_the_process_may_have(machine):
    stream = CpuStream(3, lambda: machine.wall, lambda: machine.cpu, STARVED)
    assert machine.step(stream, cores=2.5) == 3


def test_one_thread_runs_once_all_together_have_less_than_a_core(machine, stream):
    assert machine.step(stream, cores=0.2) == 4
    assert {machine.step(stream, cores=0.5) for _ in range(100)} == {1}


TORCH_FIRST = "sys.modules['torch'] = None"


@pytest.mark.parametrize(
    ("first", "count", "briefly"),
    [("", "", True), (TORCH_FIRST, "", False), (TORCH_FIRST, "3000", True)],
)
def test_threads_spin_on_if_torch_was_there_first(first, count, briefly):
    """OpenMP reads how long they do when torch is loaded: too early to shorten it then."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {"GOMP_SPINCOUNT": count} if count else {}
    code = f"import sys; {first}\nfrom sametoken.io.cores import *; print(SPINS_BRIEFLY)"
    said = subprocess.check_output([sys.executable, "-c", code], env=environment)
    assert said.decode() == f"{briefly}\n"


@pytest.mark.parametrize(("briefly", "cores"), [(True, STARVED), (False, STARVED_SPINNING)])
def test_threads_that_spin_on_need_more_cores(monkeypatch, briefly, cores):
    monkeypatch.setattr("sametoken.io.cores.SPINS_BRIEFLY", briefly)
    assert runpy.run_path(cpu_stream.__file__)["CpuStream"]().starved == cores


def test_two_threads_of_which_one_spins_for_the_other_become_one(machine):
    stream = CpuStream(64, lambda: machine.wall, lambda: machine.cpu, STARVED_SPINNING)
    torch.set_num_threads(2)
    assert {machine.step(stream, cores=1.9) for _ in range(9)} == {2}
    assert machine.step(stream, cores=1.0) == 2
    assert machine.step(stream, cores=0.5) == 1
    torch.set_num_threads(4)


def test_steps_shorter_than_a_time_slice_are_measured_together(machine, stream):
    for cores in (0.1, 3, 3, 3) * 20:
        assert machine.step(stream, cores=cores, seconds=MEASURED_S / 4) == 4


def test_all_threads_are_tried_again_once_one_is_undisturbed(machine, stream):
    machine.step(stream, cores=0.2)
    machine.step(stream, cores=1, seconds=0.9 * FIRST_PAUSE_S)
    assert machine.step(stream, cores=0.5, seconds=FIRST_PAUSE_S) == 1
    assert machine.step(stream, cores=1) == 1
    assert {machine.step(stream, cores=3) for _ in range(9)} == {4}


def test_trials_in_vain_become_rare(machine, stream):
    """One core is free, another busy: one thread is undisturbed, and four are starved."""
    before = len(machine.threads)
    while machine.wall < 100 * LONGEST_PAUSE_S:
        machine.step(stream, cores=0.2 if not stream._one_thread else 1)
    trials = machine.threads[before:].count(4)
    assert 100 <= trials <= 110


def test_a_trial_that_lasts_starts_with_short_pauses_again(machine, stream):
    for _ in range(5):
        machine.step(stream, cores=0.2)
        machine.step(stream, cores=1, seconds=LONGEST_PAUSE_S)
    machine.step(stream, cores=3)
    machine.step(stream, cores=0.2)
    machine.step(stream, cores=1, seconds=FIRST_PAUSE_S)
    assert machine.step(stream, cores=3) == 4


def test_a_number_that_the_user_lowers_is_kept(machine, stream):
    torch.set_num_threads(2)
    assert machine.step(stream, cores=2) == 2
    torch.set_num_threads(1)
    assert machine.step(stream, cores=0.1) == 1
    torch.set_num_threads(4)
    assert machine.step(stream, cores=3) == 4


def test_a_step_that_fails_leaves_the_number_of_threads_alone(machine, stream):
    machine.step(stream, cores=0.2)

    def fail():
        assert torch.get_num_threads() == 1
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        stream.submit(fail)
