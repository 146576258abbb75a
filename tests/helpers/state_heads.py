"""Heads that read one state of the target: on disk, and as they are defined in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import gelu, one_hot, pad, silu

from helpers.checkpoints import HIDDEN, VOCAB, random_tensors, write_checkpoint, write_llama

MLP, MEDUSA = "mlp_speculator", "medusa"
WIDTH = 12
#: Of a target that counts in a circle: at least one for each token.
FEATURES = 64


def mlp_tensors(
    *, tied: bool = False, width: int = WIDTH, vocab_size: int = VOCAB, hidden_size: int = HIDDEN
):
    """A speculator's tensors of 3 drafts under IBM's names, a tied one's once."""
    shapes = {}
    for i in range(3):
        if i == 0 or not tied:
            shapes |= dict.fromkeys((f"emb.{i}.weight", f"head.{i}.weight"), (vocab_size, width))
            shapes |= dict.fromkeys((f"ln.{i}.weight", f"ln.{i}.bias"), (width,))
        if i < 2 or not tied:
            shapes[f"proj.{i}.weight"] = (width, width if i else hidden_size)
    return {f"speculator.{name}": one for name, one in random_tensors(shapes, seed=0).items()}


def write_mlp(directory: Path, tensors=None, **changes) -> Path:
    """The config.json of an accelerator, whose trees nobody reads."""
    tensors = mlp_tensors() if tensors is None else tensors
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": MLP,
        "vocab_size": VOCAB,
        "emb_dim": HIDDEN,
        "inner_dim": WIDTH,
        "n_predict": 3,
        "n_candidates": 5,
        "top_k_tokens_per_head": [5, 4, 3],
        "tie_weights": False,
        "scale_input": False,
    }
    return write_checkpoint(directory, config | changes, tensors)


def rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def mlp_chain(tensors, settings, state, token: int, k: int) -> list[int]:
    """k greedy drafts after ``token``, from the state that gave it."""
    tied, n = settings.get("tie_weights", False), settings.get("n_predict", 3)
    state_weight = 0.5 ** (0.5 / n)
    emb_weight = ((1 - state_weight**2) * (settings.get("inner_dim", WIDTH) / 2)) ** 0.5
    state, drafts = state.double(), []
    if settings.get("scale_input"):
        state = rms(state) / 2**0.5
    for i in range(k):
        j, p = (0, min(i, 1)) if tied else (i, i)
        emb, proj, head, ln, bias = (
            tensors[f"speculator.{name}"].double()
            for name in (
                f"emb.{j}.weight",
                f"proj.{p}.weight",
                f"head.{j}.weight",
                f"ln.{j}.weight",
                f"ln.{j}.bias",
            )
        )
        mixed = proj @ state + emb[token] * (emb_weight / state_weight)
        state = gelu(rms(mixed) * ln + bias)
        token = int((head @ state).argmax())
        drafts.append(token)
    return drafts


def medusa_tensors(
    *,
    layers: int = 1,
    bias: bool = True,
    own: bool = True,
    vocab_size: int = VOCAB,
    hidden_size: int = HIDDEN,
):
    """3 heads' tensors under vLLM's names; ``own``: with an lm_head for each."""
    shapes = {}
    for i in range(3):
        for j in range(layers):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (hidden_size, hidden_size)
            if bias:
                shapes[f"blocks.{i}.layers.{j}.bias"] = (hidden_size,)
        if own:
            shapes[f"lm_heads.{i}.weight"] = (vocab_size, hidden_size)
    return random_tensors(shapes, seed=0)


def write_medusa(directory: Path, tensors=None, **changes) -> Path:
    """The config.json of heads in vLLM's layout."""
    tensors = medusa_tensors() if tensors is None else tensors
    config = {
        "architectures": ["MedusaModel"],
        "model_type": MEDUSA,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_heads": 3,
        "num_hidden_layers": 1,
        "max_paths": 64,
        "topk": 10,
    }
    return write_checkpoint(directory, config | changes, tensors)


def medusa_chain(tensors, lm_heads, state, k: int, token_map=None) -> list[int]:
    """k greedy drafts from the state that gave the newest token; ``lm_heads`` are by draft."""
    drafts = []
    for i in range(k):
        x, j = state.double(), 0
        while f"blocks.{i}.layers.{j}.weight" in tensors:
            bias = tensors.get(f"blocks.{i}.layers.{j}.bias", torch.zeros(1)).double()
            x = x + silu(tensors[f"blocks.{i}.layers.{j}.weight"].double() @ x + bias)
            j += 1
        column = int((lm_heads[i].double() @ x).argmax())
        drafts.append(column if token_map is None else int(token_map[column]))
    return drafts


def after(steps: int, vocab: int) -> torch.Tensor:
    """[vocab, FEATURES]: of a token's feature, the token that is ``steps`` further in a circle."""
    return one_hot((torch.arange(vocab) - steps) % vocab, FEATURES).float()


def write_circle(directory: Path, vocab_size: int = VOCAB, **sizes) -> Path:
    """A Llama whose state is its row's token, and which counts on, past the last one to 0."""
    sizes |= {"vocab_size": vocab_size, "hidden_size": FEATURES, "num_hidden_layers": 1}
    write_llama(directory, **sizes)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.embed_tokens.weight"] = after(0, vocab_size)
    tensors["model.norm.weight"] = torch.ones(FEATURES)
    tensors["lm_head.weight"] = after(1, vocab_size)
    save_file(tensors, file)
    return directory


def write_circle_head(directory: Path, kind: str, vocab: int = VOCAB) -> Path:
    """A head that knows the circle: Medusa by its blocks, a speculator from tokens too."""
    drafts, tensors = range(4), {}
    if kind == MEDUSA:
        for i in drafts:
            # The feature of a later token outweighs the state's, and the target's lm_head adds 1.
            block = pad(2 * after(i + 1, vocab), (0, 0, 0, FEATURES - vocab))
            tensors[f"blocks.{i}.layers.0.weight"] = block
        sizes = {"vocab_size": vocab, "hidden_size": FEATURES, "num_heads": len(drafts)}
        return write_medusa(directory, tensors, original_lm_head=True, **sizes)
    for i in drafts:
        # Odd drafts read the token before, even ones the state, which is of one token less.
        of_token = i % 2
        tensors[f"emb.{i}.weight"] = after(0, vocab) * of_token
        tensors[f"proj.{i}.weight"] = torch.eye(FEATURES) * (1 - of_token)
        tensors[f"head.{i}.weight"] = after(2 - of_token, vocab)
        tensors[f"ln.{i}.weight"] = torch.ones(FEATURES)
        tensors[f"ln.{i}.bias"] = torch.zeros(FEATURES)
    sizes = {"vocab_size": vocab, "emb_dim": FEATURES, "inner_dim": 0, "n_predict": len(drafts)}
    return write_mlp(directory, tensors, **sizes)
