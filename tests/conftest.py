"""One thread per test process; where there is no GPU, Triton's interpreter and forked processes.

Both are set before torch and triton are imported.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
from contextlib import suppress
from functools import cache
from pathlib import Path

# The suite runs several processes on few cores; spinning threads would fight over them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import typer.testing
from _pytest.logging import catching_logs
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers import interpreter, warm_processes
from helpers.static_steps import CHOICE
from mutants.catalogue import NAMED
from mutants.catalogue.planting import LAYOUTS
from sametoken.errors import UnsupportedError
from sametoken.ops.model.recurrent import convolution_triton
from sametoken.ops.native.library import load_library

TESTS = Path(__file__).parent

# Examples take as long as they take.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# Typer makes the commands of an application anew, in 50 ms, each time that a test runs one.
typer.testing._get_command = cache(typer.testing._get_command)

_catch_everywhere = catching_logs.__enter__


def _catch_at_the_root(self: catching_logs) -> logging.Handler:
    # Six times a test, pytest looks at all loggers for some whose records do not reach the root:
    # libraries have thousands.
    if self.level is not None:
        return _catch_everywhere(self)
    logging.root.addHandler(self.handler)
    self.attached_loggers.append(logging.root)
    return self.handler


catching_logs.__enter__ = _catch_at_the_root

if not torch.cuda.is_available():
    # Forked processes cannot use CUDA where their parent has asked for its devices.
    warm_processes.install()
    interpreter.install()
    # A program without a row takes as long as others there: few, each with several rows.
    pytest.MonkeyPatch().setattr(convolution_triton, "_PROGRAMS", 8)


def pytest_generate_tests(metafunc):
    """A test that uses ``layouts`` runs in compact and static ones, unless one is chosen."""
    if "layouts" in metafunc.fixturenames and CHOICE not in os.environ:
        metafunc.parametrize("layouts", LAYOUTS, indirect=True)


def pytest_itemcollected(item):
    """A module is a group, whose fixtures are built once; architecture shares its syntax trees.

    The scheduler of pytest-xdist looks at all groups so far after each test: few groups.
    """
    if not any(item.iter_markers("xdist_group")):
        module = item.path.relative_to(TESTS)
        shared = module.parts[0] == "architecture"
        item.add_marker(pytest.mark.xdist_group(module.parts[0] if shared else str(module)))


@pytest.fixture
def layouts(request, monkeypatch) -> None:
    """Of the steps of engines that test helpers build."""
    if hasattr(request, "param"):
        monkeypatch.setenv(CHOICE, request.param)


def with_one_layout_each(items: list) -> list:
    """Without every other layout of tests that have further parameters.

    Each of these runs in those layouts in which a mutant must make it fail; others in one: in Thue
    and Morse's order, so that no value of a parameter always meets the same.
    """
    tests: dict = {}
    for item in items:
        if "layouts" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec"):
            layout = item.callspec.params.get("layouts", "")
            further = item.callspec.id.replace(layout, "").strip("-")
            test = f"{item.nodeid.partition('::')[0]}::{item.originalname}"
            tests.setdefault(test, {}).setdefault(further, {})[layout] = item
    dropped = set()
    for test, cases in tests.items():
        for number, (further, case) in enumerate(cases.items()):
            if len(cases) > 1 and len(case) > 1:
                wanted = {steps for steps in case if (f"{test}[{further}]", steps) in NAMED}
                wanted = wanted or {list(case)[number.bit_count() % 2]}
                dropped |= {item for layout, item in case.items() if layout not in wanted}
    return [item for item in items if item not in dropped]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """An async test has an event loop of its own, or that of its fixture ``runner``."""
    test, run = pyfuncitem.obj, pyfuncitem.funcargs.get("runner", asyncio).run
    if inspect.iscoroutinefunction(test):
        pyfuncitem.obj = lambda **given: run(test(**given))


def pytest_sessionstart(session):
    gc.disable()
    # As a program at a terminal has it: what a script starts in the background ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if session.config.getoption("numprocesses", None):
        # Before there are workers, each of which would compile the kernels on a new machine.
        with suppress(UnsupportedError):
            load_library()


def pytest_collection_finish():
    """Searches for garbage are rarer than a program's."""
    gc.set_threshold(10_000, 10, 50)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def older_objects_exempt():
    """What is there before a module's tests, most of it to the end, no later search looks at."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items[:] = with_one_layout_each(items)
    # Tests that share what takes seconds to start are a group, for one process to run.
    # pytest-xdist 3.8 writes a group's name where pytest 9.2 does not read it any more.
    for item in items:
        grouped = vars(item).get("_nodeid")
        if grouped is not None:
            item._id = item._id.parse(grouped)
