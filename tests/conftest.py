"""One thread per test process, and Triton's interpreter where there is no GPU.

Both are set before torch and triton are imported.
"""

from __future__ import annotations

import os

# The suite runs several processes on few cores; spinning threads would fight over them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers import interpreter
from helpers.static_steps import CHOICE
from sametoken.ops.model.gated_delta_rule import prepare

if not torch.cuda.is_available():
    interpreter.install()
    # A program without a row takes as long as others there: few, each with several rows.
    prepare._PROGRAMS = 16


def pytest_generate_tests(metafunc):
    """A test that uses ``layouts`` runs in compact and static ones, unless one is chosen."""
    if "layouts" in metafunc.fixturenames and CHOICE not in os.environ:
        metafunc.parametrize("layouts", ["compact", "static"], indirect=True)


def pytest_itemcollected(item):
    """Whole engines, servers and attacks share fixtures by module, so a module is a group."""
    if {"e2e", "security"} & set(item.path.parts) and not any(item.iter_markers("xdist_group")):
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture
def layouts(request, monkeypatch) -> None:
    """Of the steps of engines that test helpers build."""
    if hasattr(request, "param"):
        monkeypatch.setenv(CHOICE, request.param)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    # Tests that share what takes seconds to start are a group, for one process to run.
    # pytest-xdist 3.8 writes a group's name where pytest 9.2 does not read it any more.
    for item in items:
        grouped = vars(item).get("_nodeid")
        if grouped is not None:
            item._id = item._id.parse(grouped)
