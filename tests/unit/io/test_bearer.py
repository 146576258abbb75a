"""The key's header."""

from __future__ import annotations

import pytest

from sametoken.io.bearer import bearer


@pytest.mark.parametrize("key", [None, ""])
def test_without_a_key_there_is_no_header(key):
    assert bearer(key) == {}


def test_a_key_is_shown_as_it_is():
    assert bearer("sk-~!") == {"Authorization": "Bearer sk-~!"}
