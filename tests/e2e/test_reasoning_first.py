"""A grammar, or any text, after reasoning, which a budget may end, whatever is drafted."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import pytest

from helpers.harness import Ran, ScriptedDrafter, Shape, build, counted, draft_model, request, run
from helpers.lookups import ngram_drafter
from helpers.structured import EOS, compiler, model, text_of, token
from sametoken.text.grammar.after_reasoning import GrammarAfterReasoning
from sametoken.types.structured_outputs import Reasoning, StructuredOutputs

FORM = "(ab|cd){2,4}-[0-9]{1,3}"
#: Both begin alike, and take several chunks.
PROMPTS = (tuple(range(40, 61)), (*range(40, 60), 11))
LONGEST = 22
#: A right drafter looks this far beyond the end.
BEYOND = 8
#: Three places of a window, and one more window.
PLACES = range(8)
SEEDS = (0, 1, 2, 13, 4, 5, 6, 7)
SHAPE = {"max_model_len": 96, "num_blocks": 100}


def plain(name: str, place: int, max_tokens: int = LONGEST):
    """A request without a grammar; its seed makes its first tokens all different."""
    seed = SEEDS[place]
    return request(name, PROMPTS[place % 2], max_tokens=max_tokens, temperature=1.5, seed=seed)


@lru_cache
def thoughts(place: int) -> tuple[int, ...]:
    """What the request says if nothing constrains it."""
    core = build(model(), Shape(max_num_seqs=1, **SHAPE), steps="compact")
    return tuple(run(core, [plain("free", place)]).tokens["free"])


def reasonings(place: int) -> dict[str, Reasoning]:
    """Forms of reasoning that end with the request's token at ``place``."""
    said = thoughts(place)
    before, end = said[place - 1] if place else EOS, said[place]
    forms = {"token": Reasoning((end,)), "begun": Reasoning((end,), begins=(EOS, said[0]))}
    if place > 0:
        forms["two"] = Reasoning((before, end))
    if place > 1:
        forms["header"] = Reasoning(said[:2], header_end=end)
    return forms


def budgets(place: int) -> dict[str, Reasoning]:
    """Budgets of ``place`` tokens, and ends that the request would not say."""
    end, said = token("<special>"), thoughts(place)
    assert end not in said
    return {
        "budget": Reasoning((end,), budget=place),
        "budget of two": Reasoning((end, end), budget=place),
        "begun budget": Reasoning((end,), begins=(said[0],), budget=max(place - 1, 0)),
    }


def ask(
    name: str,
    place: int,
    reasoning: Reasoning | None,
    max_tokens: int = LONGEST,
    *,
    form: str | None = FORM,
):
    asked = replace(plain(name, place, max_tokens), stop_token_ids=(EOS,))
    if form is None:
        return replace(asked, grammar=GrammarAfterReasoning(None, reasoning))
    structured = StructuredOutputs(regex=form, reasoning=reasoning)
    return replace(asked, grammar=compiler().compile(structured))


@lru_cache
def alone(place: int, reasoning: Reasoning | None, form: str | None = FORM) -> tuple[int, ...]:
    """The request by itself: no speculation, one step at a time."""
    shape = Shape(max_num_seqs=1, prefix_caching=False, **SHAPE)
    core = build(model(), shape, steps="compact")
    asked = ask("alone", place, reasoning, LONGEST + BEYOND, form=form)
    return tuple(run(core, [asked]).tokens["alone"])


#: The end at every place of a window, in the plainest form, and at some in each other one.
CASES = [(place, "token") for place in PLACES] + [
    (place, form) for place in (2, 4, 7) for form in reasonings(place) if form != "token"
]


#: Budgets of some lengths, before the form and before any text.
BUDGETS = [
    (place, name, form)
    for place, name in (
        *((0, "budget"), (1, "begun budget"), (3, "budget of two"), (5, "budget")),
        (7, "begun budget"),
    )
    for form in (FORM, None)
]
ALL = {
    **{f"{place} {name}": (place, reasonings(place)[name], FORM) for place, name in CASES},
    **{f"{place} {name} {form}": (place, budgets(place)[name], form)
       for place, name, form in BUDGETS},
}  # fmt: skip


def everything():
    return [
        ask(name, place, reasoning, form=form) for name, (place, reasoning, form) in ALL.items()
    ]


def assert_truth(ran: Ran) -> None:
    for name, case in ALL.items():
        assert ran.tokens[name] == list(alone(*case))[:LONGEST]


def right(admission) -> list[int]:
    grammar = admission.grammar
    form = None if grammar.text is None else FORM
    return list(alone(SEEDS.index(admission.params.seed), grammar.reasoning, form))


def end_too_early(phase: int):
    """The right drafts, of which every third is the end of the reasoning."""

    def oracle(admission) -> list[int]:
        early = right(admission)
        early[phase::3] = [admission.grammar.reasoning.end[-1]] * len(early[phase::3])
        return early

    return oracle


def engine(make_drafter, oracle=right, **shape):
    return build(model(), Shape(**SHAPE | shape), make_drafter=make_drafter, oracle=oracle)


def scripted(script: str):
    return lambda parts: ScriptedDrafter(parts, script)


def ngram(parts):
    return ngram_drafter(parts.shape.num_drafts)


def own_model(parts):
    return draft_model(parts, model())


@pytest.mark.parametrize(("place", "form"), CASES)
def test_the_reasoning_is_free_and_the_text_after_it_of_the_form(place, form):
    """An oracle without masks: up to the end the tokens are those of no grammar at all."""
    tokens = alone(place, reasonings(place)[form])
    assert tokens[: place + 1] == thoughts(place)[: place + 1]
    assert thoughts(place).index(thoughts(place)[place]) == place, "the end comes earlier"
    text = tokens[place + 1 :]
    assert re.fullmatch(FORM, text_of(text))
    assert set(text[text.index(EOS) :]) == {EOS}


@pytest.mark.parametrize(("place", "name", "form"), BUDGETS)
def test_a_budget_s_tokens_are_free_and_then_the_end_is_forced(place, name, form):
    """Oracles without masks: the tokens up to the budget, and any text that goes on after the end.

    The budget leaves the first token out where it is what begins the reasoning.
    """
    reasoning = budgets(place)[name]
    tokens = alone(place, reasoning, form)
    assert tokens[:place] == thoughts(place)[:place]
    behind = place + len(reasoning.end)
    assert tokens[place:behind] == reasoning.end
    text = tokens[behind:]
    if form is not None:
        assert re.fullmatch(form, text_of(text))
        return
    core = build(model(), Shape(max_num_seqs=1, **SHAPE), steps="compact")
    further = plain("further", place, max_tokens=len(text))
    prompt = (*further.prompt_token_ids, *tokens[:behind])
    further = replace(further, prompt_token_ids=prompt, max_total_tokens=len(prompt) + len(text))
    assert tuple(run(core, [further]).tokens["further"]) == text


def test_the_first_token_decides_where_the_prompt_has_not_begun_the_reasoning():
    special = token("<special>")
    reasoning = Reasoning((EOS,), begins=(special,))
    tokens = alone(0, reasoning)
    assert tokens == alone(0, None)
    assert re.fullmatch(FORM, text_of(tokens))
    assert alone(1, reasoning)[0] == special


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize(
    ("make_drafter", "steps_in_flight"),
    [
        *((scripted("right"), 1), (scripted("right"), 3), (scripted("mixed"), 2)),
        *((scripted("alternating"), 3), (ngram, 2), (own_model, 2)),
    ],
    ids=("right-1", "right-3", "mixed", "alternating", "ngram", "model"),
)
def test_every_drafter_leaves_every_token_alone(make_drafter, steps_in_flight):
    ran = run(engine(make_drafter, steps_in_flight=steps_in_flight), everything())
    assert_truth(ran)
    assert 0 < ran.accepted <= ran.offered


def test_right_drafts_are_accepted_across_the_end():
    """The rows after the end, in its window, have the masks of the form."""
    ran = run(engine(scripted("right")), everything())
    assert ran.accepted == ran.offered > 0


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize("phase", range(3))
def test_the_end_in_a_rejected_draft_ends_nothing(phase):
    core = engine(scripted("right"), end_too_early(phase), steps_in_flight=2)
    ran = run(core, everything())
    assert_truth(ran)
    assert 0 < ran.accepted < ran.offered


def test_preemption_keeps_the_reasoning_s_place():
    core = engine(scripted("mixed"), steps_in_flight=2, num_blocks=30)
    num_swapped = counted(core, "swap_outs")
    assert_truth(run(core, everything()))
    assert sum(num_swapped) > 0


def test_lost_kv_is_computed_again_and_the_place_stays():
    """Without host memory a preempted request starts over; what it has said is not said again."""
    core = engine(scripted("mixed"), num_blocks=30, num_host_blocks=0)
    num_restarted = counted(core, "restarts")
    assert_truth(run(core, everything()))
    assert sum(num_restarted) > 0
