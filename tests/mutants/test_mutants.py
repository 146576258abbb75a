"""Every planted bug makes the test fail that is named beside it.

Unplanted, that test passes: in the suite itself, or here in steps that the suite leaves out.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest

from helpers.static_steps import CHOICE, STEPS
from mutants.catalogue import MUTANTS
from mutants.catalogue.planting import COMPACT, LAYOUTS, Mutant
from sametoken.errors import InvariantError

ROOT = Path(__file__).parents[2]
#: Without what collects all garbage several times at the end of a session, and what no test uses.
WITHOUT = (
    *("unraisableexception", "threadexception", "faulthandler", "logging", "debugging", "doctest"),
    *("cacheprovider", "stepwise", "junitxml", "pastebin", "setuponly", "setupplan", "legacypath"),
)
OPTIONS = ("-q", "--capture=no", "--tb=line", *(f"-pno:{plugin}" for plugin in WITHOUT))


class Record:
    """Hooks of an inner session: how many tests passed, and what the others raised.

    ``layouts``: those in which the suite runs the test if a mutant names them.
    """

    def __init__(self) -> None:
        self.num_passed = 0
        self.raised: list[BaseException] = []
        self.layouts: tuple[str, ...] = ()

    def pytest_itemcollected(self, item) -> None:
        if "layouts" in item.fixturenames:
            self.layouts = LAYOUTS
        elif "CHOICE" not in item.function.__code__.co_names:
            self.layouts = (COMPACT,)

    def pytest_runtest_logreport(self, report) -> None:
        self.num_passed += report.when == "call" and report.passed

    def pytest_exception_interact(self, call) -> None:
        self.raised.append(call.excinfo.value)


def run_test(test: str, steps: str) -> Record:
    """Run one test in this process, its steps in one of ``helpers.static_steps.STEPS``.

    Its module and the helpers are loaded anew, so that they import what is planted, and
    are gone afterwards, so that no other test does. Its files have a directory of their own:
    of the common one, sessions of two workers at a time remove each other's.
    """
    path = test.partition("::")[0].removesuffix(".py").replace("/", ".")
    record = Record()
    loaded = _taken_out(path)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            pytest.MonkeyPatch.context() as patch,
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as files,
        ):
            patch.setenv(CHOICE, steps)
            patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
            own = (f"--rootdir={ROOT}", f"--basetemp={files}")
            pytest.main([str(ROOT / test), *own, *OPTIONS], plugins=[record])
    finally:
        _taken_out(path)
        sys.modules.update(loaded)
    return record


def _taken_out(path: str) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == path or name.split(".")[0] == "helpers"]
    return {name: sys.modules.pop(name) for name in names}


@lru_cache
def passes(test: str, steps: str) -> bool:
    record = run_test(test, steps)
    return record.num_passed == 1 and not record.raised


def causes(error: BaseException | None) -> list[BaseException]:
    """An error and what led to it: the engine wraps what a step raises."""
    return [error, *causes(error.__cause__)] if error else []


def caught_by(oracle: str, raised: BaseException) -> bool:
    """Whether a test failed in the way that its oracle does."""
    if oracle in ("tokens", "acceptance"):
        return isinstance(raised, AssertionError)
    wanted = AssertionError if oracle == "position" else (InvariantError, pytest.fail.Exception)
    return any(isinstance(error, wanted) for error in causes(raised))


def of_one_process(mutant: Mutant) -> object:
    """A parameter; mutants of one test run together, for it runs once without any."""
    test = mutant.test.rpartition("::")[2].partition("[")[0]
    group = pytest.mark.xdist_group(f"{test} {mutant.steps}")
    return pytest.param(mutant, id=mutant.name, marks=group)


@pytest.mark.parametrize("mutant", map(of_one_process, MUTANTS))
def test_its_test_fails(mutant):
    with pytest.MonkeyPatch.context() as patch:
        mutant.plant(patch)
        record = run_test(mutant.test, mutant.steps)
    assert record.num_passed == 0, f"{mutant.test} does not notice"
    (raised,) = record.raised
    assert caught_by(mutant.oracle, raised), causes(raised)
    if mutant.steps not in record.layouts:
        assert passes(mutant.test, mutant.steps), f"{mutant.test} fails without any mutant"


def test_mutants_have_names_of_their_own_and_known_oracles():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
    assert {mutant.oracle for mutant in MUTANTS} == {"tokens", "acceptance", "position", "guard"}
    assert {mutant.steps for mutant in MUTANTS} == set(STEPS)
