"""Steps of templates are counted, and of nothing else."""

from __future__ import annotations

import sys

import jinja2
import pytest

from sametoken.text.tokenizer import bounded_steps

LOOP = jinja2.Environment(autoescape=True).from_string("{% for i in range(n) %}{{ i }}{% endfor %}")


def test_a_template_within_the_bound_renders():
    with bounded_steps(1000):
        assert LOOP.render(n=3) == "012"


def test_one_beyond_it_is_broken_off():
    with pytest.raises(RuntimeError, match="more than 100 lines"), bounded_steps(100):
        LOOP.render(n=1000)


def test_other_code_is_not_counted():
    with bounded_steps(1):
        assert sum(i for i in range(1000)) == 499500


def test_whoever_traced_before_traces_again():
    def outer(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(outer)
    try:
        with pytest.raises(RuntimeError), bounded_steps(1):
            LOOP.render(n=10)
        assert sys.gettrace() is outer
    finally:
        sys.settrace(before)
