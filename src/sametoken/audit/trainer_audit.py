"""Audit a trainer: its log-probabilities of rollouts beside this engine's, and why they differ."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path

import torch
from torch import Tensor

from sametoken.audit.trainer_fit import (
    BOTH,
    MIN_TOKENS,
    STALE,
    TEMPERATURE,
    TOKENS,
    Fit,
    cause_of,
    fitted_temperature,
)
from sametoken.audit.trainer_rollouts import ScoredRollout
from sametoken.audit.trainer_scorer import Scorer
from sametoken.audit.trainer_verdict import (
    Group,
    RolloutFinding,
    TokenDifference,
    TrainerVerdict,
    WrongToken,
)
from sametoken.bench.report import environment
from sametoken.config import EngineConfig
from sametoken.engine.build import build_requested
from sametoken.engine.load import validate
from sametoken.errors import CheckpointError, ConfigError, RequestError
from sametoken.models.hub import model_name
from sametoken.models.load.sent import source_of
from sametoken.models.load.sources import TensorSource
from sametoken.models.loader import open_checkpoint
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.weight_updates import MODEL

#: Tokens of the rollouts by which a temperature is searched: each of some 45 passes runs them.
_SEARCHED_TOKENS = 1024
_MAX_SHOWN = 5


def audit_trainer(
    config: EngineConfig,
    rollouts: Sequence[ScoredRollout],
    *,
    checkpoints: Sequence[Path] = (),
    tokenizer: Tokenizer | None = None,
    concurrency: int = 8,
    announce: Callable[[str], None] = lambda text: None,
) -> TrainerVerdict:
    """Score every rollout with this engine, and explain the differences.

    The engine computes prompts, decodes and verifies drafts with the same bits, so what it says of
    a whole rollout is what it said while it generated it, with any drafter. One with fast prompts
    does not, and is refused.

    Args:
        config: with the weights that the rollouts are said to come from.
        rollouts: at least one; each with the trainer's log-probabilities.
        checkpoints: directories with other weights of the same model, which may fit better.
        tokenizer: the model's, for texts and for rollouts with ``messages``.
        concurrency: the most rollouts that are scored at once.
        announce: called with one line per phase.

    Raises:
        ConfigError: there is no rollout, the concurrency is below 1, or prompts have a fast form;
            and as ``build_engine``.
        RequestError: token ids outside of the vocabulary, messages without a tokenizer or that the
            chat template refuses, or a prompt too long for ``max_model_len`` or a rollout for the
            KV memory.
        CheckpointError: a checkpoint has no weights, damaged ones, or those of another model.
        WeightUpdateError, UnsupportedError: the weights of a checkpoint cannot replace the model's.
        NumericalError: the model gives NaN.
    """
    if not rollouts or concurrency < 1:
        raise ConfigError(
            f"{len(rollouts)} rollouts cannot be scored, {concurrency} at once",
            "give at least one, and a concurrency of at least 1",
        )
    if config.fast_prompts_from:
        raise ConfigError(
            f"with fast_prompts_from={config.fast_prompts_from} a rollout that is scored as a "
            "prompt has other low-order bits than its answer had",
            "leave the option out",
        )
    wrong = tuple(_wrong_tokens(rollouts, tokenizer))
    # Opened before the model is: a wrong path costs no loading.
    sources = [(checkpoint, source_of(checkpoint)) for checkpoint in checkpoints]
    config = replace(config, speculative_config=None)
    requested = validate(config, announce)
    _require_possible(rollouts, requested.architecture.vocab_size, requested.max_model_len - 1)
    if sources:
        own = open_checkpoint(requested.path, load_format=requested.config.load_format)
        tensors = own.open_tensors()
        for _, source in sources:
            _require_same_shapes(source, tensors)
    core = build_requested(requested, lambda text: None)
    scorer = Scorer(core, concurrency)
    # Memory may have lowered it.
    _require_possible(rollouts, core.resolved.model.vocab_size, scorer.most_tokens)
    name = model_name(Path(config.model))
    announce(f"log-probabilities of {name}")
    open_groups = [_Open.of(f"as given, with {name}", part, scorer) for part in _grouped(rollouts)]
    differing = [one for one in open_groups if not one.given.is_exact]
    for one in differing:
        announce("other temperatures and other first tokens")
        one.try_temperature(scorer)
        one.try_first_token(scorer, core.resolved.model.bos_token_id)
    for checkpoint, source in sources if differing else ():
        announce(f"weights of {checkpoint}")
        core.upkeep.use_weights(core.weights.load(source, MODEL))
        for one in differing:
            one.try_weights(scorer, str(checkpoint))
    return TrainerVerdict(
        model=name,
        groups=tuple(one.explained(tokenizer) for one in open_groups),
        wrong_tokens=wrong,
        num_cut=sum(max(0, len(one.token_ids) - scorer.most_tokens) for one in rollouts),
        environment=environment(core.resolved.device),
    )


@dataclass(frozen=True, slots=True)
class _Compared:
    """Log-probabilities by rollout, under an assumption: the trainer's in fp64, the engine's."""

    assumed: str
    cause: str
    trainer: Sequence[Tensor]
    engine: Sequence[Tensor]

    @property
    def fit(self) -> Fit:
        """Over all rollouts."""
        return Fit.of(self.assumed, self.cause, self.trainer, self.engine)

    def fit_of(self, index: int) -> Fit | None:
        """Of one rollout; None if none of its tokens can be compared."""
        theirs, ours = self.trainer[index], self.engine[index]
        return Fit.of(self.assumed, self.cause, [theirs], [ours]) if len(ours) else None


@dataclass(slots=True)
class _Open:
    """Rollouts of one weight version and temperature while their differences are explained."""

    rollouts: Sequence[ScoredRollout]
    compared: _Compared
    given: Fit
    others: dict[Fit, _Compared]

    @classmethod
    def of(cls, assumed: str, rollouts: Sequence[ScoredRollout], scorer: Scorer) -> _Open:
        """Score the rollouts as they are."""
        engine = scorer.answers(rollouts, rollouts[0].temperature)
        trainer = [
            torch.tensor(one.logprobs[: len(scores)], dtype=torch.float64)
            for one, scores in zip(rollouts, engine, strict=True)
        ]
        compared = _Compared(assumed, "", trainer, engine)
        return cls(rollouts, compared, compared.fit, {})

    @property
    def temperature(self) -> float:
        """What the rollouts say it is."""
        return self.rollouts[0].temperature

    def try_first_token(self, scorer: Scorer, bos: int | None) -> None:
        """Compare with the sequences without their first token, or with one more BOS."""
        if self.given.num_tokens < MIN_TOKENS:
            return
        if all(one.prompt_len > 1 for one in self.rollouts):
            shorter = [one.token_ids[1:] for one in self.rollouts]
            found = scorer.answers(self.rollouts, self.temperature, shorter)
            self._add("without the first token", TOKENS, found)
        if bos is not None:
            longer = [(bos, *one.token_ids) for one in self.rollouts]
            found = scorer.answers(self.rollouts, self.temperature, longer)
            self._add("after one more BOS", TOKENS, found)

    def try_weights(self, scorer: Scorer, name: str) -> None:
        """Compare with what other weights give, which the engine has now; then at a temperature."""
        assumed = f"with the weights of {name}"
        found = scorer.answers(self.rollouts, self.temperature)
        if not self._add(assumed, STALE, found).fits:
            self.try_temperature(scorer, f"{assumed} ", BOTH)

    def try_temperature(self, scorer: Scorer, assumed: str = "", cause: str = TEMPERATURE) -> None:
        """Search the temperature that fits a part of the rollouts, then compare all."""
        if self.given.num_tokens < MIN_TOKENS:
            return
        lengths = [len(one.token_ids) for one in self.rollouts]
        shortest = sorted(range(len(lengths)), key=lengths.__getitem__)
        before = accumulate((lengths[index] for index in shortest), initial=0)
        searched = [
            index for index, past in zip(shortest, before, strict=False) if past < _SEARCHED_TOKENS
        ]
        rollouts = [self.rollouts[index] for index in searched]
        trainer = [self.compared.trainer[index] for index in searched]

        def distance(temperature: float) -> float:
            return Fit.of("", "", trainer, scorer.answers(rollouts, temperature)).mean_abs

        fitted = fitted_temperature(distance, self.temperature)
        if fitted != self.temperature:
            found = scorer.answers(self.rollouts, fitted)
            self._add(f"{assumed}at temperature {fitted:.4g}", cause, found)

    def _add(self, assumed: str, cause: str, engine: list[Tensor]) -> Fit:
        # One more token before may cut one off, one less may let one in.
        pairs = [
            (one[: len(found)], found[: len(one)])
            for one, found in zip(self.compared.trainer, engine, strict=True)
        ]
        if not any(len(one) for one, _ in pairs):
            return self.given
        trainer, found = zip(*pairs, strict=True)
        compared = _Compared(assumed, cause, trainer, found)
        self.others[compared.fit] = compared
        return compared.fit

    def explained(self, tokenizer: Tokenizer | None) -> Group:
        """The finding, also rollout by rollout, with the tokens that differ most."""
        cause, best = cause_of(self.given, tuple(self.others))
        first = self.rollouts[0]
        return Group(
            weight_version=first.weight_version,
            temperature=self.temperature,
            num_rollouts=len(self.rollouts),
            cause=cause,
            best=best,
            given=self.given,
            others=tuple(self.others),
            largest=tuple(self._largest(tokenizer)),
            rollouts=tuple(self._findings(best, tokenizer)),
        )

    def _findings(self, best: Fit, tokenizer: Tokenizer | None) -> Iterator[RolloutFinding]:
        """Each rollout by what explains all; by anything where nothing does."""
        explaining = (self.others[best],) if best in self.others else tuple(self.others.values())
        for index, rollout in enumerate(self.rollouts):
            given = self.compared.fit_of(index)
            assert given is not None
            # Few tokens fit by chance.
            enough = best in self.others or given.num_tokens >= MIN_TOKENS
            others = (one.fit_of(index) for one in explaining if enough)
            cause, _ = cause_of(given, [one for one in others if one is not None])
            theirs, ours = self.compared.trainer[index], self.compared.engine[index]
            unequal = (theirs.float() != ours).nonzero().flatten().tolist()
            first = self._difference(index, unequal[0], tokenizer) if unequal else None
            yield RolloutFinding(rollout.name, cause, given, first)

    def _largest(self, tokenizer: Tokenizer | None) -> Iterator[TokenDifference]:
        distances = [
            (ours.double() - theirs).abs()
            for ours, theirs in zip(self.compared.engine, self.compared.trainer, strict=True)
        ]
        count = min(_MAX_SHOWN, self.given.num_tokens - self.given.num_equal)
        starts = list(accumulate(map(len, distances), initial=0))
        for place in torch.cat(distances).topk(count).indices.tolist():
            index = bisect_right(starts, place) - 1
            yield self._difference(index, place - starts[index], tokenizer)

    def _difference(
        self, index: int, position: int, tokenizer: Tokenizer | None
    ) -> TokenDifference:
        rollout = self.rollouts[index]
        token_id = rollout.token_ids[rollout.prompt_len + position]
        return TokenDifference(
            rollout=rollout.name,
            position=position,
            token_id=token_id,
            text=None if tokenizer is None else tokenizer.decode_token(token_id),
            trainer=float(self.compared.trainer[index][position]),
            engine=float(self.compared.engine[index][position]),
        )


def _grouped(rollouts: Sequence[ScoredRollout]) -> Iterator[list[ScoredRollout]]:
    """Rollouts that say the same of themselves, in the order of weight versions."""

    def said(one: ScoredRollout) -> tuple[int, float]:
        return (-1 if one.weight_version is None else one.weight_version, one.temperature)

    for _, part in groupby(sorted(rollouts, key=said), said):
        yield list(part)


def _require_possible(rollouts: Sequence[ScoredRollout], vocab_size: int, most_tokens: int) -> None:
    for one in rollouts:
        if max(one.token_ids) >= vocab_size:
            raise RequestError(
                f"rollout {one.name} has the token id {max(one.token_ids)}, the model has "
                f"{vocab_size} tokens",
                "audit with the model of the rollouts",
            )
        if one.prompt_len >= most_tokens:
            raise RequestError(
                f"rollout {one.name} has a prompt of {one.prompt_len} tokens, of which "
                f"max_model_len leaves room for {most_tokens - 1}",
                "raise max_model_len",
            )


def _require_same_shapes(source: TensorSource, own: TensorSource) -> None:
    for name in source.names():
        if name in own.names() and source.shape(name) != own.shape(name):
            raise CheckpointError(
                f"tensor {name} of {source.location} has shape {list(source.shape(name))}, "
                f"that of {own.location} {list(own.shape(name))}",
                "give other weights of the same model",
            )


def _wrong_tokens(
    rollouts: Sequence[ScoredRollout], tokenizer: Tokenizer | None
) -> Iterator[WrongToken]:
    """The first difference of each prompt from what the chat template gives for its messages."""
    for one in rollouts:
        if one.messages is None:
            continue
        if tokenizer is None:
            raise RequestError("messages need a tokenizer", "leave skip_tokenizer_init out")
        text = tokenizer.apply_chat_template(list(one.messages), add_generation_prompt=True)
        expected = tokenizer.encode(text, add_special_tokens=False)
        found = one.token_ids[: one.prompt_len]
        if expected != found:
            yield WrongToken.of(one.name, expected, found, tokenizer.decode_token)
