"""Errors in words."""

from __future__ import annotations

import errno

import pytest

from sametoken.errors import in_words
from sametoken.io.files import open_regular


def test_an_error_of_the_system_has_neither_its_number_nor_its_path(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        open_regular(tmp_path / "none")
    assert in_words(missing.value) == "no such file or directory"
    assert in_words(OSError(errno.ENOSPC, "No space left on device")) == "no space left on device"


@pytest.mark.parametrize("error", [OSError("it is a device"), ValueError("it is a device")])
def test_other_errors_say_what_they_say(error):
    assert in_words(error) == "it is a device"
