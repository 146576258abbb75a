from __future__ import annotations

from sametoken.runner.stream import ImmediateStream, LaggingStream


def test_immediate_work_is_done_at_once():
    done = []
    event = ImmediateStream().submit(lambda: done.append(1))
    assert done == [1]
    event.wait()


def test_lagging_work_waits_and_keeps_order():
    done = []
    stream = LaggingStream()
    events = [stream.submit(lambda i=i: done.append(i)) for i in range(4)]
    assert done == []
    events[1].wait()
    assert done == [0, 1]
    events[0].wait()
    assert done == [0, 1]
    events[3].wait()
    assert done == [0, 1, 2, 3]


def test_the_device_may_progress_by_itself():
    done = []
    stream = LaggingStream(progress=lambda queued: int(queued == 3))
    for i in range(4):
        stream.submit(lambda i=i: done.append(i))
    assert done == [0, 1]
