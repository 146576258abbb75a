"""Pickled handles are read as data: whatever else a pickle asks for is refused, and not done."""

from __future__ import annotations

import base64
import os
import pickle
import tracemalloc

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, rebuild_tensor

from sametoken.serving.http.ipc_handles import _MAX_HANDLES, read_handles
from sametoken.types.weight_updates import MemoryHandle

COUNTER, HOST_MEMORY = b"/torch_12_3456_0", b"/proc/12/fd/34"
#: What ``torch.multiprocessing.reductions.reduce_tensor`` returns beside its function.
PLACE = (
    *(torch.nn.Parameter, torch.Size([2, 3]), (3, 1), 300, torch.storage.TypedStorage),
    *(torch.bfloat16, 0, bytes(range(66)), 2**33, 512, True, COUNTER, 70, bytes(64), True),
)
READ = MemoryHandle(
    "bfloat16", (2, 3), (3, 1), 300, bytes(range(66)), 2**33, 512, COUNTER, 70, bytes(64), True
)


def encoded(found, protocol: int = 4) -> str:
    return base64.b64encode(pickle.dumps(found, protocol)).decode()


def changed(**fields) -> tuple:
    place = [*PLACE]
    for index, value in fields.items():
        place[int(index[1:])] = value
    return tuple(place)


@pytest.mark.parametrize("protocol", [4, 5])
def test_what_vllms_trainers_send(protocol):
    scalar = changed(_1=torch.Size([]), _2=(), _6=5, _13=b"", _14=False)
    several = [{"GPU-1": PLACE, "GPU-2": scalar}, {"GPU-1": PLACE}]
    assert read_handles(encoded(several, protocol)) == (
        {"GPU-1": READ, "GPU-2": read_handles(encoded({"x": scalar}))["x"]},
        {"GPU-1": READ},
    )
    # One buffer, and the form with the function.
    assert read_handles(encoded({"GPU-1": PLACE}, protocol)) == {"GPU-1": READ}
    with_function = [{"GPU-1": (rebuild_cuda_tensor, PLACE)}]
    assert read_handles(encoded(with_function, protocol)) == ({"GPU-1": READ},)
    assert read_handles(encoded([], protocol)) == ()


class Calls:
    """Pickled as a call of ``function``."""

    def __init__(self, function, *arguments) -> None:
        self._call = function, arguments

    def __reduce__(self):
        return self._call


def test_nothing_is_called(tmp_path):
    made = tmp_path / "made"
    for call in (
        Calls(os.system, f"touch {made}"),
        Calls(eval, f"open({str(made)!r}, 'w')"),
        Calls(open, str(made), "w"),
        Calls(torch.load, str(made)),
        Calls(rebuild_tensor, torch.Tensor, None, ()),
        Calls(torch.Size, [2] * 9),
    ):
        for place in (call, {"GPU-1": call}, [{"GPU-1": changed(_1=call)}], [call, {}]):
            pickle.dumps(place, 4)
            with pytest.raises(ValueError, match="no handles"):
                read_handles(encoded(place))
    assert not made.exists()


@pytest.mark.parametrize(
    "place",
    [
        PLACE[:-1],
        (*PLACE, 1),
        changed(_0=torch.Size),
        changed(_1=[2, 3]),
        changed(_1=torch.Size([2])),
        changed(_1=(1,) * 9, _2=(1,) * 9),
        changed(_2=(3, -1)),
        changed(_2=(3, True)),
        changed(_3=2**60),
        changed(_4=torch.Tensor),
        changed(_5="bfloat16"),
        changed(_7=b""),
        changed(_7="text"),
        changed(_7=bytes(5000)),
        changed(_8=-1),
        # Shared memory of others, where a counter would be changed; and any file.
        changed(_11=b"/psm_12345"),
        changed(_11=b"/torch_1_2_3/../x"),
        changed(_12=10_000),
        changed(_7=b"/etc/passwd", _11=b""),
        changed(_7=b"/proc/1/environ", _11=b""),
        changed(_7=HOST_MEMORY + b"\n", _11=b""),
        changed(_13=bytes(63)),
        (os.system, PLACE),
        None,
        {},
    ],
)
def test_fields_that_no_handle_has(place):
    for found in ({"GPU-1": place}, [{"GPU-1": place}], [{"GPU-1": PLACE}, {3: PLACE}]):
        with pytest.raises(ValueError, match="no handles"):
            read_handles(encoded(found))
    assert read_handles(encoded({"GPU-1": changed(_7=HOST_MEMORY, _11=b"")}))


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b"\x80\x04",
        pickle.dumps([{"GPU-1": PLACE}], 4)[:-9],
        # A table that is made larger than any memory; pops of nothing; a structure within itself.
        b"\x80\x04]r\xff\xff\xff\x7f.",
        b"\x80\x04\x86.",
        b"\x80\x04u.",
        b"\x80\x04]\x94h\x00a.",
        b"\x80\x04}\x94}h\x00s.",
        b"cposix\nsystem\n(S'true'\ntR.",
        # Pairs in the place of a dict: their keys could be of any type.
        pickle.dumps([[("GPU-1", PLACE)]], 4),
        *(pickle.dumps([{"GPU-1": PLACE}], protocol) for protocol in (0, 1, 2, 3)),
    ],
)
def test_other_pickles(pickled):
    with pytest.raises(ValueError, match="no handles"):
        read_handles(base64.b64encode(pickled).decode())


def doubled(times: int, opcode: bytes, end: bytes) -> bytes:
    """A pickle in which each thing is made of the one before it, twice."""
    references = (b"h%c" % number for number in range(times))
    steps = b"".join(one + one + opcode + b"\x94" for one in references)
    return b"\x80\x04\x8c\x08aaaaaaaa\x94" + steps + end + b"."


@pytest.mark.parametrize(
    "pickled",
    [
        # A name; a tuple in a name, on either side.
        doubled(20, b"\x93", b""),
        doubled(20, b"\x86", b"\x8c\x01a\x93"),
        doubled(20, b"\x86", b"\x94\x8c\x01ah\x15\x93"),
    ],
)
def test_a_few_bytes_take_no_memory(pickled):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="no handles"):
            read_handles(base64.b64encode(pickled).decode())
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_handles_that_are_meant_again_and_again():
    device = {f"GPU-{number}": PLACE for number in range(_MAX_HANDLES // 2**10)}
    assert len(read_handles(encoded([device] * 2))) == 2
    with pytest.raises(ValueError, match="no handles"):
        read_handles(encoded([device] * 2**10 + [{"GPU-1": PLACE}]))


def test_other_text():
    for text in ("?", "é", "AAA"):
        with pytest.raises(ValueError, match="no handles"):
            read_handles(text)
