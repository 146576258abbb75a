"""Sweeps: the product of the axes, names of cells, presets, files and flags."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from sametoken.bench.sweep_spec import Sweep, changed_engine_options, make_sweep
from sametoken.config import EngineConfig
from sametoken.errors import ConfigError

NGRAM = {"method": "ngram"}


def cells(sweep):
    return list(itertools.chain.from_iterable(sweep.engines()))


def test_cells_are_the_product_of_all_axes():
    sweep = Sweep(
        model=("a", "b"),
        drafter=(None, NGRAM, {"method": "ngram", "num_speculative_tokens": 9}),
        num_speculative_tokens=(2, 3),
        tensor_parallel_size=(1, 2),
        output_len=(1, 8),
        concurrency=(1, 4, 8),
        temperature=(0.0, 0.8),
    )
    engines = list(sweep.engines())
    # Plain decoding has no k, and a drafter may bring its own.
    assert len(engines) == 2 * (1 + 2 + 1) * 2
    assert all(len(one) == 2 * 3 * 2 for one in engines)
    ks = {(c.speculative_config or {}).get("num_speculative_tokens") for c in cells(sweep)}
    assert ks == {None, 2, 3, 9}
    names = [cell.name for cell in cells(sweep)]
    assert len(set(names)) == len(names)
    assert all(cell.engine["max_num_seqs"] == 8 for cell in cells(sweep))


def test_engine_options_make_an_engine():
    cell = cells(Sweep(model=("m",), drafter=(NGRAM,), engine={"dtype": "float32"}))[0]
    config = EngineConfig.from_options(**cell.engine_options())
    assert (config.model, config.dtype, config.max_num_seqs) == ("m", "float32", 1)
    assert (config.num_speculative_tokens, config.enable_prefix_caching) == (3, False)
    plain = cells(Sweep(model=("m",), tensor_parallel_size=(2,)))[0]
    assert plain.engine_options()["tensor_parallel_size"] == 2
    assert plain.engine_options()["speculative_config"] is None


def test_a_cascade_is_named_by_both_of_its_parts():
    drafter = {"method": "mtp", "num_speculative_tokens": 8, "cascade": "ngram"}
    (cell,) = cells(make_sweep(None, None, {"model": "a", "drafter": [drafter]}))
    assert "-cascade-ngram-then-mtp-k8-" in cell.name


def test_a_name_is_readable_and_changes_with_every_field():
    cell = cells(Sweep(model=("/models/Tiny 1",), drafter=(NGRAM,)))[0]
    assert cell.name.startswith("Tiny-1-ngram-k3-tp1-in512-out128-c1-t0-")
    changes = {"seed": 1, "num_iters": 9, "warmup": 0, "engine": {"dtype": "float32"}}
    for name, value in changes.items():
        assert dataclasses.replace(cell, **{name: value}).name != cell.name


def test_the_grid_of_vllm_38311():
    sweep = make_sweep("vllm-38311", None, {"model": ["m"], "drafter": [NGRAM]})
    found = {
        (c.output_len, c.concurrency, c.temperature, c.speculative_config["num_speculative_tokens"])
        for c in cells(sweep)
    }
    assert found == {(out, c, 0.0, 3) for out in (1, 1024) for c in (1, 8, 64)}


def test_flags_override_a_file_and_a_file_a_preset():
    file = {"model": "m", "output_len": [7], "concurrency": [2], "engine": {"dtype": "float32"}}
    sweep = make_sweep("peer", file, {"concurrency": [3]})
    assert (sweep.model, sweep.input_len, sweep.output_len, sweep.concurrency) == (
        ("m",),
        (512,),
        (7,),
        (3,),
    )
    assert sweep.engine == {"dtype": "float32"}
    assert json.loads(json.dumps(dataclasses.asdict(cells(sweep)[0])))["output_len"] == 7


def test_a_file_takes_drafters_and_names_as_the_command_line_does():
    asked = {"model": "m", "tensor-parallel-size": 2, "output-len": [7]}
    sweep = make_sweep(None, asked, {})
    assert (sweep.tensor_parallel_size, sweep.output_len) == ((2,), (7,))
    for drafter in ("ngram", '{"method": "ngram"}', NGRAM):
        sweep = make_sweep(None, asked | {"drafter": [drafter, "none"]}, {})
        assert sweep.drafter == (NGRAM, None)
    assert make_sweep(None, asked | {"drafter": "ngram"}, {}).drafter == (NGRAM,)
    assert make_sweep(None, asked | {"drafter": None}, {}).drafter == (None,)


def test_an_engine_may_choose_its_own_slots():
    sweep = make_sweep(None, {"model": "m", "concurrency": 8, "engine": {"max_num_seqs": 0}}, {})
    assert cells(sweep)[0].engine_options()["max_num_seqs"] == 0


def test_options_of_all_engines_override_one_by_one():
    file = {"model": "m", "engine": {"dtype": "float32", "max-model-len": 64}}
    sweep = make_sweep(None, file, {"engine": {"dtype": "bfloat16"}})
    assert sweep.engine == {"dtype": "bfloat16", "max_model_len": 64}


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({}, "has no model"),
        ({"model": ["m"], "output_len": []}, "has no output_len. Give one by --output-len"),
        ({"model": ["m"], "output_lens": [1]}, "has no 'output_lens'"),
        (
            {"model": ["m"], "output_len": ["1"]},
            "output_len='1' is not .* Give an integer, or a list",
        ),
        ({"model": ["m"], "concurrency": [True]}, "concurrency=True"),
        (
            {"model": ["m"], "num_iters": "3"},
            "num_iters='3' is not possible in a sweep. Give an integer$",
        ),
        ({"model": ["m"], "temperature": ["hot"]}, "temperature='hot' .* Give a number"),
        ({"model": ["m"], "engine": 3}, "engine=3 is not possible in a sweep. Give a JSON object"),
        ({"model": ["m"], "drafter": [3]}, "Give one, a method's name, or none"),
        ({"model": ["m"], "drafter": ["{"]}, "Give one, a method's name, or none"),
        ({"model": ["m"], "concurrency": [1, 1]}, "in512-out128-c1-t0-.* twice"),
        ({"model": ["m"], "drafter": ["ngram", {**NGRAM, "num_speculative_tokens": 3}]}, "twice"),
        ({"model": ["m"], "engine": {"model": "n"}}, "Give it as the axis model"),
        ({"model": ["m"], "engine": {"speculative-config": NGRAM}}, "Give it as the axis drafter"),
        ({"model": ["m"], "engine": {"tensor_parallel_size": 2}}, "axis tensor_parallel_size"),
        ({"model": ["m"], "concurrency": 8, "engine": {"max_num_seqs": 4}}, "above max_num_seqs=4"),
        ({"model": ["m"], "num_iters": 0}, "num_iters=0 is not possible. Use at least 1"),
        ({"model": ["m"], "warmup": -1}, "warmup=-1 is not possible. Use at least 0"),
        ({"model": ["m"], "input_len": [8, 0]}, "input_len"),
        ({"model": ["m"], "temperature": [float("nan")]}, "temperature=nan"),
        ({"model": ["m"], "dataset": "foo"}, "'foo' is not known"),
        ({"model": ["m"], "dataset": "custom", "path": "/nope"}, "/nope cannot be read"),
        ({"model": ["m"], "path": "/nope"}, "'random' takes no file"),
        ({"model": ["m"], "dataset": "gsm8k", "input_len": [8, 9]}, "gsm8k have lengths of their"),
        ({"model": ["m"], "tensor_parallel_size": [0]}, "tensor_parallel_size=0"),
        ({"model": ["m"], "drafter": [{"method": "oracle"}]}, "'oracle' is not known"),
    ],
)
def test_what_makes_no_sweep_is_refused(given, cause):
    with pytest.raises(ConfigError, match=cause):
        make_sweep(None, given, {})
    with pytest.raises(ConfigError, match="is not known"):
        make_sweep("vllm-1", None, {"model": ["m"]})


def test_only_changed_options_name_a_cell():
    defaults = dataclasses.asdict(EngineConfig())
    assert changed_engine_options(defaults) == {}
    assert changed_engine_options(defaults | {"dtype": "float32"}) == {"dtype": "float32"}
