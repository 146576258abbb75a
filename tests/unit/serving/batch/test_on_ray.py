"""How lines are divided among engines on Ray, and how a run there ends."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest
from ray.exceptions import RayError

from sametoken.config import EngineConfig
from sametoken.errors import EngineDeadError
from sametoken.serving.batch import on_ray
from sametoken.serving.batch.config import BatchConfig
from sametoken.serving.batch.lines import InputLine
from sametoken.serving.batch.on_ray import EngineActor, answer_on_ray

LINES = [InputLine(number, b"%d" % number) for number in range(7)]


class Data:
    """Stands for ``ray.data``, and notes what it is asked for."""

    blocks: tuple[pa.Table | Exception, ...] = ()

    def from_items(self, rows, override_num_blocks: int):
        self.rows, self.num_blocks = rows, override_num_blocks
        return self

    def map_batches(self, actor, **options):
        self.actor, self.options = actor, options
        return self

    def iter_batches(self, **form):
        for block in self.blocks:
            if isinstance(block, Exception):
                raise block
            yield block


@pytest.fixture
def cluster(monkeypatch):
    """What Ray is asked for, in a cluster with GPUs that this process has started."""
    found = SimpleNamespace(data=Data(), ended=0, is_ours=True)

    def end() -> None:
        found.ended += 1

    monkeypatch.setattr(on_ray, "connect", lambda: found.is_ours)
    monkeypatch.setattr(on_ray, "device_on_ray", lambda device: "cuda")
    monkeypatch.setattr(on_ray.ray, "shutdown", end)
    monkeypatch.setattr(on_ray.ray, "data", found.data)
    return found


@pytest.mark.parametrize(
    ("concurrency", "replicas", "per_block", "num_blocks", "size"),
    [(4, 2, 2, 4, 2), (1, 2, 1, 7, 2), (5, 9, 3, 3, 3), (99, 2, 50, 1, 1), (0, 3, 16, 1, 1)],
)
def test_an_engine_has_two_blocks_of_half_its_lines(
    cluster, concurrency, replicas, per_block, num_blocks, size
):
    options = {"concurrency": concurrency, "replicas": replicas, "ray_num_cpus": 0.5}
    config = EngineConfig(model="toy", max_num_seqs=32, tensor_parallel_size=2)
    answer_on_ray(config, BatchConfig(("a", "b"), ray=True, **options), LINES, list)
    assert cluster.data.rows == [{"number": one.number, "raw": one.raw} for one in LINES]
    assert cluster.data.num_blocks == num_blocks
    asked = cluster.data.options
    assert (cluster.data.actor, asked["num_cpus"], asked["num_gpus"]) == (EngineActor, 0.5, 2)
    (on_gpus, names, lines) = asked["fn_constructor_args"]
    assert (on_gpus.device, names, lines) == ("cuda", ("a", "b"), per_block)
    pool = asked["compute"]
    assert (pool.min_size, pool.max_size) == (size, size)
    assert (pool.max_tasks_in_flight_per_actor, pool.max_concurrent_calls_per_actor) == (2, 2)


def run(cluster, *blocks: pa.Table | Exception) -> list[tuple[str, bytes]]:
    """What is taken."""
    cluster.data.blocks, taken = blocks, []
    answer_on_ray(EngineConfig(model="toy"), BatchConfig(ray=True), LINES, taken.extend)
    return taken


def test_each_block_is_taken_when_it_is_there(cluster):
    blocks = [pa.table({"key": keys, "result": [b"x"] * len(keys)}) for keys in (["a", "b"], ["c"])]
    assert run(cluster, *blocks) == [("a", b"x"), ("b", b"x"), ("c", b"x")]


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_cluster_that_the_run_has_started_ends_with_it(cluster, is_ours):
    cluster.is_ours = is_ours
    assert run(cluster) == []
    with pytest.raises(EngineDeadError, match=r"\(no memory\)\. Fix the cause; the same command"):
        run(cluster, RayError("a long traceback\n  no memory\n"))
    assert cluster.ended == 2 * is_ours
