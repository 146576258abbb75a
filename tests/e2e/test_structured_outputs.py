"""Structured outputs: always of their form, and the same tokens whatever is drafted."""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache

import pytest

from helpers.harness import Ran, ScriptedDrafter, Shape, build, counted, draft_model, run
from helpers.lookups import ngram_drafter
from helpers.structured import EOS, model, structured_request, text_of, token
from sametoken.types.structured_outputs import StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "yes"]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["a", "b", "c"],
}
JSON = StructuredOutputs(json_schema=json.dumps(SCHEMA))
REGEX = StructuredOutputs(regex="(ab|cd){2,4}-[0-9]{1,3}")
GRAMMAR = StructuredOutputs(grammar='root ::= "(" root ")" | [a-z]{1,6} | "10"')
WORD = StructuredOutputs(regex="[a-z]{3,20}")
EITHER = StructuredOutputs(regex=REGEX.regex, free_after="<c>")
CHOICE = StructuredOutputs(choice=("yes", "no", 'a "quoted" one'))
FEW_SPACES = dict.fromkeys(map(token, (" ", "Ċ", "č", "ĉ")), -3.0)
#: A form and parameters. Seeds are all different: with the prompt they name a request's truth.
CASES = (
    (JSON, {"seed": 0, "logit_bias": FEW_SPACES}),
    (JSON, {"seed": 1, "temperature": 0.9, "logit_bias": FEW_SPACES}),
    (REGEX, {"seed": 2, "temperature": 1.2, "top_k": 3}),
    (REGEX, {"seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5}),
    (WORD, {"seed": 4, "temperature": 1.0, "min_tokens": 9, "stop_token_ids": (token("q"),)}),
    (GRAMMAR, {"seed": 5, "logit_bias": {token("("): 2.0}, "temperature": 0.8, "top_p": 0.8}),
    (CHOICE, {"seed": 6, "logprobs": 2}),
    (JSON, {"seed": 7, "presence_penalty": 0.3, "min_p": 0.01, "logit_bias": FEW_SPACES}),
    (EITHER, {"seed": 8, "temperature": 1.0}),
    (EITHER, {"seed": 9, "temperature": 1.0, "logit_bias": {token("<"): 9.0, EOS: 5.0}}),
)
PROMPTS = ((40, 41, 42, 43, 44, 45, 46, 47, 48), (40, 41, 42, 43, 44, 45, 46, 47, 11))
LONGEST = 42
BEYOND = 8
SHAPE = {"max_model_len": 128, "num_blocks": 100}


def ask(name: str, prompt, case: int, max_tokens: int = LONGEST):
    structured, params = CASES[case]
    return structured_request(name, prompt, structured, max_tokens=max_tokens, **params)


@lru_cache
def alone(prompt: tuple[int, ...], case: int) -> tuple[int, ...]:
    """The request by itself: no speculation, one step at a time."""
    shape = Shape(max_num_seqs=1, prefix_caching=False, **SHAPE)
    core = build(model(), shape, steps="compact")
    ran = run(core, [ask("alone", prompt, case, LONGEST + BEYOND)])
    return tuple(ran.tokens["alone"])


def prompt_of(case: int) -> tuple[int, ...]:
    """Every other case's; both begin alike."""
    return PROMPTS[case % 2]


@lru_cache
def truths() -> dict[int, list[int]]:
    return {case: list(alone(prompt_of(case), case)) for case in range(len(CASES))}


def make_drafter(kind: str):
    if kind == "ngram":
        return lambda parts: ngram_drafter(parts.shape.num_drafts)
    if kind == "self":
        return lambda parts: draft_model(parts, model())
    return lambda parts: ScriptedDrafter(parts, kind)


def engine(kind: str, **shape):
    return build(
        model(),
        Shape(**SHAPE | shape),
        make_drafter=make_drafter(kind),
        oracle=lambda admitted: list(alone(admitted.prompt_token_ids, admitted.params.seed)),
    )


def everything():
    """All cases."""
    return [ask(str(case), prompt_of(case), case) for case in range(len(CASES))]


def assert_truth(ran: Ran) -> None:
    for case, truth in truths().items():
        assert ran.tokens[str(case)] == truth[:LONGEST]


def is_of_form(text: str, structured: StructuredOutputs) -> bool:
    if structured is JSON:
        found = json.loads(text)
        flags = found["c"]
        return (
            found.keys() == {"a", "b", "c"}
            and 0 <= found["a"] <= 99
            and found["b"] in ("x", "yes")
            and len(flags) <= 2
            and all(isinstance(flag, bool) for flag in flags)
        )
    if structured is REGEX:
        return re.fullmatch(structured.regex, text) is not None
    if structured is EITHER:
        return is_of_form(text, REGEX) or text.startswith("<c>")
    if structured is CHOICE:
        return text in structured.choice
    if structured is WORD:
        return re.fullmatch(structured.regex, text) is not None
    depth = text.count("(")
    return re.fullmatch(rf"\({{{depth}}}([a-z]{{1,6}}|10)\){{{depth}}}", text) is not None


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize(
    ("kind", "steps_in_flight"),
    [
        *(("right", 3), ("wrong", 1), ("alternating", 3), ("empty", 2), ("mixed", 1)),
        *(("ngram", 2), ("self", 2)),
    ],
)
def test_every_drafter_leaves_every_token_alone(kind, steps_in_flight):
    ran = run(engine(kind, steps_in_flight=steps_in_flight), everything())
    assert_truth(ran)
    assert ran.offered > 0
    if kind == "right":
        assert ran.accepted == ran.offered
    elif kind == "wrong":
        assert ran.accepted == 0
    else:
        assert ran.accepted > 0


def test_drafts_of_the_right_form_that_are_wrong_leave_no_trace():
    """The grammar allows them, the target prefers others after some of them."""
    other = {2: 3, 3: 2}
    core = build(
        model(),
        Shape(steps_in_flight=2, **SHAPE),
        make_drafter=make_drafter("right"),
        oracle=lambda admitted: list(alone(admitted.prompt_token_ids, other[admitted.params.seed])),
    )
    ran = run(core, [ask(f"{p}-{c}", PROMPTS[p], c, 14) for p in range(2) for c in other])
    for name, tokens in ran.tokens.items():
        p, case = map(int, name.split("-"))
        assert tokens == list(alone(PROMPTS[p], case))[:14]
    assert 0 < ran.accepted < ran.offered


def test_every_answer_is_of_its_form_and_then_only_eos_follows():
    for case, tokens in truths().items():
        end = tokens.index(EOS)
        assert is_of_form(text_of(tokens), CASES[case][0])
        assert set(tokens[end:]) == {EOS}


def test_both_kinds_of_answers_come_where_either_may():
    answer, free = (text_of(truths()[case]) for case in (8, 9))
    assert is_of_form(answer, REGEX)
    assert free.startswith("<c>")
    assert len(free) > len("<c>") + 5


def test_preemption_keeps_the_place_in_the_grammar():
    core = engine("mixed", steps_in_flight=2, num_blocks=34, max_model_len=88)
    num_swapped = counted(core, "swap_outs")
    assert_truth(run(core, everything()))
    assert sum(num_swapped) > 0


def test_json_is_valid_48_times_of_48():
    chance = random.Random(5)
    core = build(
        model(),
        Shape(max_num_seqs=8, num_blocks=300, max_num_batched_tokens=48, max_model_len=128),
        make_drafter=make_drafter("ngram"),
    )
    asked = [
        structured_request(
            str(i),
            [chance.randrange(2, 258) for _ in range(chance.randint(1, 6))],
            JSON,
            max_tokens=60,
            temperature=chance.choice((0.0, 0.7, 1.0)),
            logit_bias=FEW_SPACES,
            seed=i,
        )
        for i in range(48)
    ]
    ran = run(core, asked)
    texts = [text_of(tokens) for tokens in ran.tokens.values()]
    assert sum(is_of_form(text, JSON) for text in texts) == 48
    assert len(set(texts)) > 24
    assert ran.accepted > 0


def test_a_slot_s_next_request_starts_its_own_grammar():
    """One slot: the second request must not go on where the first one stood."""
    core = build(model(), Shape(max_num_seqs=1, **SHAPE), make_drafter=make_drafter("ngram"))
    ran = run(core, [ask("first", PROMPTS[0], 2, 4), ask("next", PROMPTS[1], 0)])
    assert ran.tokens["next"] == list(alone(PROMPTS[1], 0))[:LONGEST]


@pytest.mark.parametrize("kind", [None, "ngram", "right"])
def test_a_request_without_an_allowed_token_fails_alone(kind):
    """The grammar ends after three letters, where min_tokens forbids the only token left."""
    prompt, short = PROMPTS[0], StructuredOutputs(regex="[a-z]{3}")
    letters = list(alone_without_min_tokens(prompt, short))
    sound = list(alone(PROMPTS[1], 1))
    core = build(
        model(),
        Shape(**SHAPE),
        make_drafter=make_drafter(kind) if kind else None,
        oracle=lambda admitted: letters if admitted.params.min_tokens else sound,
    )
    core.add_request(structured_request("blocked", prompt, short, max_tokens=20, min_tokens=9))
    core.add_request(ask("sound", PROMPTS[1], 1))
    updates = {"blocked": [], "sound": []}
    emitted = {"blocked": [], "sound": []}
    while core.has_unfinished:
        for update in core.step():
            updates[update.request_id].append(update)
            emitted[update.request_id] += update.token_ids
        if len(emitted["sound"]) >= LONGEST:
            core.release("sound")
    failed = [update.mask_fault for update in updates["blocked"]]
    assert failed == [False] * (len(failed) - 1) + [True]
    assert updates["blocked"][-1].failed
    assert emitted["blocked"] == letters[:3]
    assert emitted["sound"][:LONGEST] == sound[:LONGEST]


def alone_without_min_tokens(prompt, structured) -> list[int]:
    core = build(model(), Shape(max_num_seqs=1, **SHAPE))
    asked = structured_request("r", prompt, structured, max_tokens=12)
    return run(core, [asked]).tokens["r"]
