"""The cores of this process: those it may run on, within a container's quota."""

from __future__ import annotations

import os

import pytest

from sametoken.io.cores import num_usable_cores

V2, QUOTA, PERIOD = "cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({V2: "max 100000\n"}, 8),
        ({V2: "400000 100000\n"}, 4),
        ({V2: "150000 100000\n"}, 2),
        ({V2: "5000 100000\n"}, 1),
        ({V2: "6400000 100000\n"}, 8),
        ({QUOTA: "-1\n", PERIOD: "100000\n"}, 8),
        ({QUOTA: "300000\n", PERIOD: "100000\n"}, 3),
        ({QUOTA: "300000\n"}, 8),
        ({V2: "what\n"}, 8),
        ({V2: ""}, 8),
        ({V2: "400000 0\n"}, 8),
    ],
)
def test_cores_within_the_quota(files, cores, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_usable_cores(tmp_path) == cores


def test_systems_without_affinity_have_all_cores(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert num_usable_cores(tmp_path) == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert num_usable_cores(tmp_path) == 1
