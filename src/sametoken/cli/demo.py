"""``sametoken demo``: the same tokens, faster, on code edits and a word problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from sametoken.cli.report import first_difference, per_position, status_console, tokens_per_second
from sametoken.cli.streaming import ACCEPTED_STYLE, shown
from sametoken.config import DEFAULT_MODEL, SpeculativeConfig
from sametoken.models.names import HYBRID_NAME, in_checkout
from sametoken.types.outputs import RequestOutput
from sametoken.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from sametoken.cli.console import Console
    from sametoken.llm import LLM

AUDIT_FAILED = 1
NGRAM = SpeculativeConfig(
    method="ngram", num_speculative_tokens=12, prompt_lookup_max=4, prompt_lookup_min=2
)
CASCADE = SpeculativeConfig(
    method="eagle3", num_speculative_tokens=12, cascade="ngram", cascade_model_tokens=3
)
LONG_NGRAM = SpeculativeConfig(
    method="ngram", num_speculative_tokens=64, prompt_lookup_max=10, prompt_lookup_min=2
)
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
#: Positions in the table, so that it fits 80 columns.
_SHOWN_POSITIONS = 3

_CODE = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("The amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("The amount must be positive")
        if amount > self.balance:
            raise ValueError("The balance is too low")
        self.balance -= amount
        self.history.append(("withdraw", amount))

    def report(self):
        print("Owner:", self.owner)
        print("Balance:", self.balance)
        for kind, amount in self.history:
            print(kind, amount)
"""
CODE_EDIT = (
    f"```python\n{_CODE}```\nRename the class Account to BankAccount. Return the whole class."
)
WORD_PROBLEM = (
    "A train travels 60 miles in the first hour and 45 miles in each of the next two hours. "
    "How far does it travel in all, and what is its average speed?"
)


CALCULATOR_EDIT = """\
<code>
class Calculator:
    def add(self, a, b):
        return a + b

    def subtract(self, a, b):
        return a - b

    def multiply(self, a, b):
        return a * b

    def divide(self, a, b):
        return a / b
</code>
<update>
Add a power method
</update>"""


@dataclass(frozen=True, slots=True)
class Scene:
    """A prompt, the speculative configs to compare by name, and the model.

    ``ignore_eos`` ignores the end-of-text token. ``note`` is shown above the first answer.
    """

    title: str
    prompt: str
    drafts: Mapping[str, SpeculativeConfig]
    model: str = DEFAULT_MODEL
    ignore_eos: bool = True
    note: str = ""


SCENES = (
    Scene("A code edit", CODE_EDIT, {"n-gram": NGRAM}),
    Scene("A word problem", WORD_PROBLEM, {"n-gram or EAGLE-3": CASCADE}),
)
HYBRID_SCENE = Scene(
    "A calculator edit",
    CALCULATOR_EDIT,
    {"n-gram, 64 drafts": LONG_NGRAM, "MTP": MTP},
    model=HYBRID_NAME,
    ignore_eos=False,
    note=f"The model is {HYBRID_NAME}; most of its layers keep a recurrent state. It was trained "
    "for tests: it repeats code, and seldom makes the requested edit.",
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt completed without and with speculation; ``drafts`` names the drafter."""

    title: str
    drafts: str
    plain: RequestOutput
    speculative: RequestOutput

    @property
    def first_difference(self) -> int | None:
        """The index of the first different token; None if all are equal."""
        return first_difference(self.plain, self.speculative)

    def summary(self) -> str:
        """Return one line: whether the tokens are the same."""
        num_tokens = len(self.plain.outputs[0].token_ids)
        if self.first_difference is None:
            return f"same tokens: yes ({num_tokens} of {num_tokens})"
        return f"same tokens: no (first difference at {self.first_difference})"


def demo(
    max_tokens: Annotated[
        int, typer.Option(min=2, help="tokens per answer; SmolLM2's end-of-text token is ignored")
    ] = 128,
) -> None:
    """Answer prompts without and with speculation and compare the tokens."""
    from sametoken.cli.console import Console

    console = Console(highlight=False, soft_wrap=True)
    # The hybrid model ships only with the repository.
    scenes = (*SCENES, HYBRID_SCENE) if in_checkout(HYBRID_NAME) else SCENES
    plain, drafting = _loaded(scenes, status_console().print)
    console.print(
        f"Greedy, {max_tokens} tokens each; SmolLM2's end-of-text token is ignored. "
        f"[{ACCEPTED_STYLE}]Green[/] tokens were drafted and accepted."
    )
    comparisons = []
    for scene, llms in zip(scenes, drafting, strict=True):
        comparisons += play(scene, plain[scene.model], llms, max_tokens, console)
    console.print(comparison_table(comparisons))
    if any(comparison.first_difference is not None for comparison in comparisons):
        raise typer.Exit(AUDIT_FAILED)


def _loaded(
    scenes: Sequence[Scene], announce: Callable[[str], None]
) -> tuple[dict[str, LLM], list[dict[str, LLM]]]:
    """Load and warm up engines: plain ones by model, and each scene's by drafter."""
    from sametoken.llm import LLM

    models = dict.fromkeys(scene.model for scene in scenes)
    plain = {model: LLM(model, announce=announce) for model in models}
    drafting = [
        {
            drafts: LLM(scene.model, announce=lambda line: None, speculative_config=speculation)
            for drafts, speculation in scene.drafts.items()
        }
        for scene in scenes
    ]
    for llms in (plain, *drafting):
        for llm in llms.values():
            llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=4))
    return plain, drafting


def play(
    scene: Scene, plain: LLM, drafting: Mapping[str, LLM], max_tokens: int, console: Console
) -> list[Comparison]:
    """Answer a scene's prompt without speculation and with each drafter.

    Raises:
        NumericalError: a request failed.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=scene.ignore_eos)
    console.rule(f"{scene.title}, one token a step")
    if scene.note:
        console.print(scene.note)
    without = answer(plain, scene.prompt, params, console)
    comparisons = []
    for drafts, llm in drafting.items():
        console.rule(f"{scene.title}, with drafts: {drafts}")
        speculative = answer(llm, scene.prompt, params, console)
        comparisons.append(Comparison(scene.title, drafts, without, speculative))
        console.print(comparisons[-1].summary())
    return comparisons


def answer(llm: LLM, prompt: str, params: SamplingParams, console: Console) -> RequestOutput:
    """Answer a prompt and stream its text, accepted drafts in green.

    Raises:
        NumericalError: the request failed.
    """
    prompt_tokens = llm.render_chat([{"role": "user", "content": prompt}])
    outputs = llm.generate_stream(prompt_tokens, params)
    *_, output = shown(outputs, llm.get_tokenizer(), console)
    console.print()
    if output.outputs[0].error is not None:
        raise output.outputs[0].error
    return output


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Build a table of the speed and acceptance of every run; it fits 80 columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("tokens", "tokens/s", "acceptance\nlength", "per\nposition", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, comparison in enumerate(comparisons):
        base = tokens_per_second(comparison.plain)
        if index == 0 or comparisons[index - 1].plain is not comparison.plain:
            table.add_row(comparison.title, *_figures(comparison.plain, base))
        table.add_row(f"  {comparison.drafts}", *_figures(comparison.speculative, base))
    return table


def _figures(output: RequestOutput, base: float) -> tuple[str, ...]:
    rate, speculation = tokens_per_second(output), output.metrics.speculation
    return (
        str(len(output.outputs[0].token_ids)),
        f"{rate:.1f}",
        f"{speculation.acceptance_length:.2f}",
        per_position(speculation.acceptance_per_position, _SHOWN_POSITIONS),
        f"{rate / base:.2f}x" if base else "-",
    )
