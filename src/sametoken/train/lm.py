"""``sametoken train lm``: a small language model from scratch, with its tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sametoken.errors import ConfigError
from sametoken.models.layer_types import FULL, LINEAR
from sametoken.models.load.huggingface import model_config
from sametoken.models.load.settings import Settings
from sametoken.models.nemotron_h import LAYER_TYPES
from sametoken.train.acceptance import Acceptance, count_accepted
from sametoken.train.compute import Compute
from sametoken.train.corpus import Corpus, Source, encode_corpus
from sametoken.train.loop import run_loop
from sametoken.train.networks import DecoderNetwork
from sametoken.train.options import MAX_SEED, LMOptions, LoopOptions
from sametoken.train.progress import Report, StepLoss
from sametoken.train.results import training_in, write_decoder, write_result
from sametoken.train.tokenizer import (
    END_OF_TEXT,
    TURN_END,
    load_trained_tokenizer,
    require_vocab_size,
    save_tokenizer,
    train_tokenizer,
)

# Measured windows are drawn with a seed that no training may have.
_MEASURED_STEPS = 16
_MEASURING_SEED = MAX_SEED + 1
# Most characters that the tokenizer is trained on.
_TOKENIZER_CHARACTERS = 60_000_000


@dataclass(frozen=True, slots=True)
class LMResult:
    """Results of a training, as written to ``training.json``.

    Attributes:
        tokens: of the corpus.
        trained_tokens: tokens of all steps.
        perplexity: over new windows of the corpus.
        acceptance: there, how often each draft of the MTP module is accepted if all before it
            were.
    """

    steps: int
    seconds: float
    loss: float
    parameters: int
    tokens: int
    trained_tokens: int
    perplexity: float
    acceptance: tuple[float, ...]
    average_length: float


class LMObjective:
    """The loss of the next token and, with an MTP module, of the tokens after it.

    The module's loss is the mean over its drafts, weighted by ``mtp_weight``.

    Args:
        network: the model.
        corpus: the text that windows are drawn from.
        options: the module's steps and weight.
        loop: the size of a batch, and the seed.
        compute: the precision.
    """

    def __init__(
        self,
        network: DecoderNetwork,
        corpus: Corpus,
        options: LMOptions,
        loop: LoopOptions,
        compute: Compute,
    ) -> None:
        self.network = network
        self._corpus = corpus
        self.options = options
        self._loop = loop
        self._compute = compute
        self._num_windows = max(loop.batch_tokens // loop.max_length, 1)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a batch."""
        return self._num_windows * self._loop.max_length

    def loss(self, step: int) -> StepLoss:
        """See ``Objective``."""
        main, drafts, acceptance = self.losses(self._loop.seed, step)
        return StepLoss(main + self.options.mtp_weight * drafts, acceptance)

    def losses(self, seed: int, step: int) -> tuple[Tensor, Tensor, Acceptance]:
        """The losses of the next token and of the module, and the acceptance of its drafts."""
        windows = self._corpus.windows(seed, step, self._num_windows, self._loop.max_length)
        token_ids = windows.to(self._compute.device)
        with self._compute.autocast():
            states = self.network(token_ids)
            logits = functional.linear(states, self.network.head)
            main = _next_token_loss(logits, token_ids, 1)
            if self.options.module_steps == 0:
                none = Acceptance.none(0, token_ids.device)
                return main, torch.zeros_like(main), none
            drafts, acceptance = self._module(token_ids, states, logits.detach().argmax(-1))
        return main, drafts, acceptance

    def _module(
        self, token_ids: Tensor, states: Tensor, greedy: Tensor
    ) -> tuple[Tensor, Acceptance]:
        """The module's loss; draft i of row r is compared with the model's token at r + 1 + i."""
        k, length = self.options.module_steps, token_ids.shape[1]
        losses, correct, goes_on = [], [], []
        # Rows whose last draft still has a token of the window to compare with.
        num_rows = length - k - 1
        for draft, last in enumerate(self.network.unroll(token_ids, states, k)):
            logits = functional.linear(last, self.network.head)
            losses.append(_next_token_loss(logits, token_ids, 2 + draft))
            chosen = logits.detach()[:, :num_rows].argmax(-1)
            correct.append(chosen == greedy[:, 1 + draft : 1 + draft + num_rows])
            agrees = greedy[:, draft : draft + num_rows] == token_ids[:, 1 + draft :][:, :num_rows]
            goes_on.append(agrees if draft else torch.ones_like(agrees))
        found, _ = count_accepted(torch.stack(correct).flatten(1), torch.stack(goes_on).flatten(1))
        return torch.stack(losses).mean(), found


def _next_token_loss(logits: Tensor, token_ids: Tensor, ahead: int) -> Tensor:
    """The mean cross entropy of rows against the tokens ``ahead`` of them."""
    rows = logits[:, :-ahead].float().flatten(0, 1)
    return functional.cross_entropy(rows, token_ids[:, ahead:].flatten())


def train_lm(
    output: Path,
    sources: list[Source],
    options: LMOptions,
    loop: LoopOptions,
    *,
    report: Callable[[Report], None],
    announce: Callable[[str], None],
) -> LMResult:
    """Train a tokenizer and a model, and write a checkpoint that the engine runs.

    Args:
        output: its directory.
        sources: documents.
        options: the architecture and its sizes.
        loop: for how long and how fast; ``max_length`` is the length of the windows.
        report: receives the progress every few steps.
        announce: receives a line before each long part.

    Raises:
        ConfigError: an option, a source or the output directory is not possible.
        CheckpointError: a checkpoint to resume from cannot be read.
        NumericalError: the loss is not finite.
    """
    began = time.monotonic()
    _require_long_windows(loop.max_length, options.module_steps)
    require_vocab_size(options.vocab_size)
    # Impossible sizes are refused before the text is read; its tokenizer has no more tokens.
    with torch.device("meta"):
        _network(lm_config(options, options.vocab_size, (0, 1), loop.max_length), options)
    settings = {"kind": "lm", "sources": [f"{s.path.name}={s.share:g}" for s in sources]}
    settings |= asdict(options) | {"mtp_steps": options.module_steps}
    with training_in(output, loop, settings) as compute:
        if loop.resume:
            tokenizer = load_trained_tokenizer(output)
        else:
            announce("training the tokenizer")
            tokenizer = train_tokenizer(_sample(sources), options.vocab_size)
            save_tokenizer(tokenizer, output)
        ends = tuple(tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, END_OF_TEXT))
        corpus = encode_corpus(
            sources,
            lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"],
            end=ends[1],
            length=loop.max_length,
            announce=announce,
        )
        config = lm_config(options, len(tokenizer), ends, loop.max_length)
        network = _network(config, options)
        network.initialise(loop.seed)
        network = network.to(compute.device)
        objective = LMObjective(network, corpus, options, loop, compute)
        announce(f"{_parameters(network)} parameters, {corpus.num_tokens} tokens of text")
        identity = settings | {"text": corpus.digest}
        last = run_loop(objective, loop, output, report, identity=identity, began=began)
        write_decoder(output, config, network)
        result = _result(objective, last, corpus, began)
        write_result(output, settings | {"loop": asdict(loop)}, asdict(result))
        return result


def _network(config: dict[str, Any], options: LMOptions) -> DecoderNetwork:
    architecture = model_config(Settings(config, "the new model"))
    return DecoderNetwork(architecture, mtp=options.module_steps > 0)


def _require_long_windows(max_length: int, module_steps: int) -> None:
    """Refuse windows in which the module's last draft meets no token to compare with."""
    least = module_steps + 2
    if max_length < least:
        raise ConfigError(
            f"windows of max_length={max_length} tokens are too short for {module_steps} drafts",
            f"use a max_length of at least {least}, or fewer mtp_steps",
        )


def _result(objective: LMObjective, last: Report, corpus: Corpus, began: float) -> LMResult:
    perplexity, acceptance = _measure(objective)
    return LMResult(
        steps=last.step,
        seconds=round(time.monotonic() - began, 1),
        loss=last.loss,
        parameters=_parameters(objective.network),
        tokens=corpus.num_tokens,
        trained_tokens=last.step * objective.tokens_per_step,
        perplexity=perplexity,
        acceptance=acceptance.conditional,
        average_length=acceptance.length,
    )


def lm_config(
    options: LMOptions, vocab_size: int, ends: tuple[int, ...], max_length: int
) -> dict[str, Any]:
    """config.json of the model."""
    config = {
        "vocab_size": vocab_size,
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "head_dim": options.head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": max_length,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": ends[1],
        "eos_token_id": list(ends),
        "dtype": "bfloat16",
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if options.architecture == "llama":
        names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
        return config | names | {"rope_parameters": rope, "rope_theta": 10000.0}
    if options.architecture == "nemotron_h":
        return config | _nemotron_h(options)
    kinds = [FULL if (i + 1) % 4 == 0 else LINEAR for i in range(options.num_layers)]
    return config | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": kinds,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": options.linear_head_dim,
        "linear_value_head_dim": options.linear_head_dim,
        "linear_num_key_heads": options.linear_key_heads,
        "linear_num_value_heads": options.linear_value_heads,
        "mtp_num_hidden_layers": int(options.module_steps > 0),
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": rope | {"partial_rotary_factor": 0.5},
        "partial_rotary_factor": 0.5,
    }


def _nemotron_h(options: LMOptions) -> dict[str, Any]:
    """What a Nemotron-H's config.json has of its own."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "num_hidden_layers": len(options.layer_letters),
        "layers_block_type": [LAYER_TYPES[letter] for letter in options.layer_letters],
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-6,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": options.linear_value_heads,
        "mamba_head_dim": options.linear_head_dim,
        "n_groups": options.linear_key_heads,
        "ssm_state_size": options.linear_head_dim,
        "conv_kernel": 4,
        "use_conv_bias": True,
        # transformers bounds the time steps of prompts by this, the engine by no more than 0.
        "time_step_min": 0.0,
        "n_routed_experts": options.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": options.num_experts_per_tok,
        "moe_intermediate_size": options.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": options.intermediate_size,
        "num_nextn_predict_layers": int(options.module_steps > 0),
        "mtp_layers_block_type": [LAYER_TYPES["*"], LAYER_TYPES["E"]],
    }


def _sample(sources: list[Source]) -> list[str]:
    """Text of every source in proportion to its share, for the tokenizer."""
    total = sum(source.share for source in sources)
    texts = []
    for source in sources:
        left = int(_TOKENIZER_CHARACTERS * source.share / total)
        for text in source.documents():
            if left <= 0:
                break
            texts.append(text[:left])
            left -= len(text)
    return texts


@torch.no_grad()
def _measure(objective: LMObjective) -> tuple[float, Acceptance]:
    """Perplexity and acceptance over windows of another seed."""
    found = [objective.losses(_MEASURING_SEED, step) for step in range(_MEASURED_STEPS)]
    mean = torch.stack([main for main, _, _ in found]).mean()
    return float(mean.exp()), sum((more for _, _, more in found[1:]), start=found[0][2])


def _parameters(network: DecoderNetwork) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
