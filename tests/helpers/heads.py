"""Runs draft heads alone: what they take from a target, rows of one slot, poisoned KV.

And what they are defined as, in plain PyTorch over a whole sequence.
"""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import HIDDEN, VOCAB, write_config
from helpers.forward import kept_at
from helpers.recurrent import poison
from helpers.rows import ragged_rows
from sametoken.errors import DrafterMismatchError
from sametoken.layers.norm import RMSNorm
from sametoken.models.base import HiddenStates
from sametoken.models.loader import read_config
from sametoken.ops.backend import AttentionRows, Kernels
from sametoken.ops.dispatch import select_kernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.state.caches import ModelCache

CPU = torch.device("cpu")
KERNELS = ReferenceKernels()
BLOCK_SIZE = 4
OPTIONS = {"kernels": KERNELS, "dtype": torch.float32, "device": CPU, "max_positions": 32}


both_kernels = pytest.mark.parametrize(
    "kernels", [KERNELS, select_kernels(CPU)], ids=["reference", "selected"]
)


class SharedTarget:
    """The weights that a head may take from its target; two of them are there as matrices too."""

    def __init__(self, hidden: int = HIDDEN, kernels: Kernels = KERNELS) -> None:
        generator = torch.Generator().manual_seed(99)
        self.embedding_matrix = torch.randn(VOCAB, hidden, generator=generator)
        self.head_matrix = torch.randn(VOCAB, hidden, generator=generator)
        self.embedding = kernels.pack(self.embedding_matrix.clone())
        self.head = kernels.pack(self.head_matrix.clone())
        self.final_norm = RMSNorm(kernels, 1 + 0.1 * torch.randn(hidden, generator=generator), 1e-5)

    def whole_head(self):
        return self.head


def load_sharing(checkpoint, kernels: Kernels):
    """A head that these kernels run, over the embedding and the lm_head of a target."""
    shared = SharedTarget(kernels=kernels)
    head = checkpoint.load(shared, **OPTIONS | {"kernels": kernels})
    assert head.embedding is shared.embedding
    assert head.lm_head is shared.head
    return head


def linear(tensors, x, name):
    return torch.nn.functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def rms_norm(x, weight, eps: float = 1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def gated_mlp(tensors, x, name):
    gate = torch.nn.functional.silu(linear(tensors, x, f"{name}.gate_proj"))
    return linear(tensors, gate * linear(tensors, x, f"{name}.up_proj"), f"{name}.down_proj")


def rotated(y, width: int = 8, theta: float = 10000.0):
    """[heads, T, 8]: the first ``width`` elements of a head are turned, the others stay."""
    angles = torch.arange(y.shape[1])[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    low, high, rest = y.split((width // 2, width // 2, 8 - width), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


def attended(q, k, v, window: int | None = None):
    """[T, heads * 8]: causal, over the sequence or a window; q and k are already turned."""
    scores = q @ k.transpose(1, 2) / 8**0.5
    every = torch.ones(scores.shape[1:], dtype=torch.bool)
    unseen = every.triu(1) | every.tril(-(window or len(every)))
    return (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def require_defined_states(
    head, definition, lm_head, tolerance: float = 1e-4, norm=lambda states: states
) -> None:
    """Logits and fed-back states of two chunks and a drafted row are those of a definition.

    Args:
        head: reads states of the size that the target makes its logits from.
        definition: of ids and states of a whole sequence, gives the head's own states.
        lm_head: the matrix that its logits are made with.
        norm: what its own states pass before.
    """
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(VOCAB, (9,), generator=generator)
    hidden = torch.randn(9, lm_head.shape[1], generator=generator)
    kv = empty_kv(head)
    first = head.forward(token_ids[:5], hidden[:5].clone(), rows_of_one_slot(0, 5), kv)
    rest = head.forward(token_ids[5:], hidden[5:].clone(), rows_of_one_slot(5, 4), kv)
    # A drafted row: the head's own state in the place of the target's.
    drafted = torch.tensor([3])
    own = head.forward(drafted, rest.feedback[-1:].clone(), rows_of_one_slot(9, 1), kv)

    hidden = torch.cat((hidden, definition(token_ids, hidden)[-1:]))
    states = definition(torch.cat((token_ids, drafted)), hidden)
    passes, close = (first, rest, own), {"atol": tolerance, "rtol": tolerance}
    found = torch.cat([head.compute_logits(one.last) for one in passes])
    torch.testing.assert_close(found, norm(states) @ lm_head.T, **close)
    feedback = torch.cat([one.feedback for one in passes])
    torch.testing.assert_close(feedback, states, **close)


def require_reads_what_logits_are_made_from(head, hidden_size: int = HIDDEN) -> None:
    """And leaves it as it is: all rows are not copied for it."""
    hidden = HiddenStates(torch.randn(5, hidden_size), torch.randn(5, 0))
    rows = torch.tensor([3, 0])
    assert torch.equal(head.target_states(hidden, rows), hidden.last[rows])
    given, before = head.target_states(hidden, None), hidden.last.clone()
    head.forward(torch.arange(5), given, rows_of_one_slot(0, 5), empty_kv(head))
    assert torch.equal(given, before)
    assert torch.equal(hidden.last, before)


def require_target_of_its_sizes(checkpoint, write, width: str, directory) -> None:
    """A head is refused for a target of another vocabulary or width.

    Args:
        checkpoint: the head's class.
        write: writes a head of the sizes of ``LLAMA`` to a directory, with changed settings.
        width: the head's setting that tells the target's.
    """
    write_config(directory)
    for name, size, message in (
        ("vocab_size", 31, "31 tokens, the target has 23"),
        (width, 48, "48 hidden elements, the target has 16"),
    ):
        with pytest.raises(DrafterMismatchError, match=message):
            checkpoint(write(directory / "head", **{name: size})).require_fit(
                read_config(directory)
            )
    with pytest.raises(DrafterMismatchError, match="23 x 16, the target's is 23 x 20"):
        checkpoint(write(directory / "head")).load(SharedTarget(hidden=20), **OPTIONS)


def rows_of_one_slot(first: int, count: int) -> AttentionRows:
    return ragged_rows([(0, first, count)], torch.tensor([[2, 0, 3, 1], [4, 4, 4, 4]]), BLOCK_SIZE)


def empty_kv(head) -> ModelCache:
    cache = ModelCache.allocate(
        head.caches, num_blocks=4, block_size=BLOCK_SIZE, max_num_seqs=1, num_drafts=0, device=CPU
    )
    return poison(cache)


def require_kept_rows_alone(head, vocab_size: int, hidden_size: int) -> None:
    """Rows that are kept have the states of a pass that keeps all, and the same KV is written."""
    generator = torch.Generator().manual_seed(6)
    token_ids = torch.randint(vocab_size, (7,), generator=generator)
    hidden = torch.randn(7, hidden_size, generator=generator)
    whole_kv = empty_kv(head)
    whole = head.forward(token_ids, hidden.clone(), rows_of_one_slot(0, 7), whole_kv)
    for places in ([6], [4, 0, 5], []):
        rows, kv = rows_of_one_slot(0, 7), empty_kv(head)
        states = head.forward(token_ids, hidden.clone(), rows, kv, kept_at(rows, places))
        assert torch.equal(states.last, whole.last[places])
        assert torch.equal(states.feedback, whole.feedback[places])
        for memory, whole_memory in zip(kv.blocks, whole_kv.blocks, strict=True):
            assert torch.equal(memory.nan_to_num(7.0), whole_memory.nan_to_num(7.0))
