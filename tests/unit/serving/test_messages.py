"""Messages and errors cross between the processes whole."""

from __future__ import annotations

import pytest

from sametoken.errors import ConfigError, EngineRestartingError, OverloadedError
from sametoken.io.child_process import LENGTH, Failure, decode, encode
from sametoken.serving.messages import Release


def test_a_frame_is_its_length_and_the_message():
    frame = encode(Release({"a": 3, "b": None}, aborted=True))
    assert LENGTH.unpack(frame[:8]) == (len(frame) - 8,)
    assert decode(bytearray(frame[8:])) == Release({"a": 3, "b": None}, aborted=True)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a", "b"),
        EngineRestartingError("a", "b"),
        OverloadedError("a", "b", retry_after_s=7.5),
    ],
)
def test_errors_arrive_with_all_they_say(error):
    received = decode(encode(Failure(error))[8:]).error
    assert type(received) is type(error)
    assert vars(received) == vars(error)
