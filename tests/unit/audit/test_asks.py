"""The requests of an audit, by their names."""

from __future__ import annotations

import pytest

from sametoken.audit.asks import make_requests
from sametoken.bench.datasets import DatasetItem
from sametoken.errors import ConfigError


def names_of(ids, temperatures):
    items = [DatasetItem(name, ("text",)) for name in ids]
    requests = make_requests(items, None, temperatures=temperatures, max_tokens=4, templated=False)
    return [request.name for request in requests]


def test_every_prompt_is_asked_at_every_temperature():
    assert names_of(["a", "b"], (0.0, 0.5)) == ["a@0", "a@0.5", "b@0", "b@0.5"]


@pytest.mark.parametrize(("ids", "temperatures"), [("aba", (0.0, 0.5)), ("ab", (0.0, 0.0))])
def test_answers_that_could_not_be_told_apart_are_refused(ids, temperatures):
    """Answers are kept by name: one would stand for both."""
    with pytest.raises(ConfigError, match="2 requests of the audit are named 'a@0'"):
        names_of(ids, temperatures)
