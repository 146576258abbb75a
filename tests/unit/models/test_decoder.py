"""The decoder body: auxiliary hidden states, chunks and batches."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from helpers.forward import CPU, Bench, OneRun, load
from helpers.rows import ragged_rows
from sametoken.ops.dispatch import select_kernels
from sametoken.ops.layer import WHOLE_LAYER_ROWS
from sametoken.ops.reference import ReferenceKernels

transformers_logging.disable_progress_bar()
NUM_LAYERS = 4
PROMPT = torch.randint(50, (23,), generator=torch.Generator().manual_seed(0)).tolist()
BACKENDS = [ReferenceKernels(), select_kernels(CPU)]


@pytest.fixture(scope="module")
def theirs_and_path(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    theirs = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("decoder")
    theirs.save_pretrained(path)
    return theirs, path


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("aux_layers", [(2, 1, 3), (0,), (NUM_LAYERS,), (1, 1)])
def test_auxiliary_states_are_the_inputs_of_the_layers(theirs_and_path, kernels, aux_layers):
    theirs, path = theirs_and_path
    # transformers' hidden_states[i] is the input of layer i; the last one is normed, so the
    # stream before the final norm is taken from the norm's own input.
    before_norm = []
    hook = theirs.model.norm.register_forward_pre_hook(lambda _, x: before_norm.append(x[0]))
    with torch.inference_mode():
        states = theirs.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    hook.remove()
    streams = [*states[:NUM_LAYERS], before_norm[0]]
    expected = torch.cat([streams[index][0] for index in aux_layers], dim=-1)
    found = Bench(load(path, kernels, aux_layers=aux_layers)).run(PROMPT, 0)
    torch.testing.assert_close(found.auxiliary, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.last, states[-1][0], atol=1e-4, rtol=1e-4)


def test_without_auxiliary_layers_there_are_none(theirs_and_path):
    hidden = Bench(load(theirs_and_path[1])).run(PROMPT, 0)
    assert hidden.auxiliary.shape == (len(PROMPT), 0)
    assert hidden.auxiliary.dtype == hidden.last.dtype


def calls_of_layers(model, monkeypatch) -> list[tuple[int, int, int]]:
    """Where the model's calls of whole layers are noted: their rows, first layer and end."""
    calls, whole = [], model._whole

    class Noted:
        ends = whole.ends

        def __call__(self, x, residual, layers, *of_pass):
            calls.append((len(x), layers.start, layers.stop))
            return whole(x, residual, layers, *of_pass)

    monkeypatch.setattr(model, "_whole", Noted())
    return calls


@pytest.mark.parametrize(
    ("num_rows", "aux_layers", "expected"),
    [
        (1, (), [(1, 0, NUM_LAYERS)]),
        (WHOLE_LAYER_ROWS, (), [(WHOLE_LAYER_ROWS, 0, NUM_LAYERS)]),
        (WHOLE_LAYER_ROWS + 1, (), []),
        (2, (3, 1), [(2, 0, 1), (2, 1, 3), (2, 3, NUM_LAYERS)]),
        (2, (0, NUM_LAYERS), [(2, 0, NUM_LAYERS)]),
    ],
)
def test_few_rows_run_whole_layers_between_the_states_that_are_kept(
    theirs_and_path, num_rows, aux_layers, expected, monkeypatch
):
    model = load(theirs_and_path[1], select_kernels(CPU), aux_layers=aux_layers)
    calls, bench = calls_of_layers(model, monkeypatch), Bench(model, num_slots=num_rows)
    runs = [(slot, 0, 1) for slot in range(num_rows)]
    rows = ragged_rows(runs, bench.sequences.block_table, bench.sequences.block_size)
    model.forward(torch.arange(num_rows) % 50, rows, bench.kv)
    assert calls == expected


def test_the_last_layer_of_a_call_may_drop_rows(theirs_and_path, monkeypatch):
    model = load(theirs_and_path[1], select_kernels(CPU))
    expected = OneRun(model, max_len=64).run(PROMPT, 0).last[[3, 22]]
    calls = calls_of_layers(model, monkeypatch)
    found = OneRun(model, max_len=64).run(PROMPT, 0, kept=[3, 22])
    assert calls == [(len(PROMPT), 0, NUM_LAYERS)]
    assert torch.equal(found.last, expected)


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_company_do_not_change_a_bit(theirs_and_path, kernels, dtype):
    model = load(theirs_and_path[1], kernels, dtype=dtype)
    whole = Bench(model).logits(PROMPT, [])
    assert torch.equal(Bench(model).logits(PROMPT, [7, 1, 9]), whole)
    assert torch.equal(Bench(model).logits(PROMPT, [1] * len(PROMPT)), whole)
    assert whole.dtype == torch.float32

    shared = Bench(model, num_slots=3)
    runs = [(slot, 0, len(PROMPT)) for slot in (0, 2)]
    rows = ragged_rows(runs, shared.sequences.block_table, shared.sequences.block_size)
    other = [(token + 1) % 50 for token in PROMPT]
    hidden = model.forward(torch.tensor(other + PROMPT), rows, shared.kv)
    assert torch.equal(model.compute_logits(hidden.last)[len(PROMPT) :], whole)


def test_rows_beyond_the_rotary_table_do_not_pass_silently(theirs_and_path):
    model = load(theirs_and_path[1], max_positions=64)
    with pytest.raises(IndexError):
        Bench(model, max_len=128).run([1], 64)
