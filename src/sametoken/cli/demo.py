"""``sametoken demo``: the same tokens, sooner, shown on a code edit and on a word problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from sametoken.cli.report import per_position, tokens_per_second
from sametoken.config import DEFAULT_MODEL, SpeculativeConfig
from sametoken.core.outputs import RequestOutput
from sametoken.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sametoken.engine.llm import LLM

AUDIT_FAILED = 1
NGRAM = SpeculativeConfig(
    method="ngram", num_speculative_tokens=12, prompt_lookup_max=4, prompt_lookup_min=2
)
CASCADE = SpeculativeConfig(
    method="eagle3", num_speculative_tokens=12, cascade="ngram", cascade_model_tokens=3
)
ACCEPTED_STYLE = "bold green"

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


@dataclass(frozen=True, slots=True)
class Scene:
    """A prompt, and how drafts for it are made: ``drafts`` says it in words."""

    title: str
    prompt: str
    drafts: str
    speculation: SpeculativeConfig


SCENES = (
    Scene("A code edit", CODE_EDIT, "n-gram", NGRAM),
    Scene("A word problem", WORD_PROBLEM, "n-gram or EAGLE-3", CASCADE),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt completed without and with speculation."""

    scene: Scene
    plain: RequestOutput
    speculative: RequestOutput

    @property
    def first_difference(self) -> int | None:
        """The first position, from 0, at which the tokens differ."""
        left, right = (out.outputs[0].token_ids for out in (self.plain, self.speculative))
        for position, (one, other) in enumerate(zip(left, right, strict=False)):
            if one != other:
                return position
        return None if len(left) == len(right) else min(len(left), len(right))

    def verdict(self) -> str:
        """Whether the tokens are the same, in words."""
        num_tokens = len(self.plain.outputs[0].token_ids)
        if self.first_difference is None:
            return f"same tokens: yes ({num_tokens} of {num_tokens})"
        return f"same tokens: no (first difference at {self.first_difference})"


def demo(
    max_tokens: Annotated[
        int, typer.Option(min=2, help="tokens per answer; the end-of-text token is ignored")
    ] = 128,
) -> None:
    """Answer two prompts without and with speculation and compare the tokens."""
    from rich.console import Console

    from sametoken.engine.llm import LLM

    console = Console(highlight=False, soft_wrap=True)
    status = Console(stderr=True, highlight=False, soft_wrap=True)
    plain = LLM(DEFAULT_MODEL, announce=status.print)
    drafting = [
        LLM(DEFAULT_MODEL, announce=_say_nothing, speculative_config=scene.speculation)
        for scene in SCENES
    ]
    for llm in (plain, *drafting):
        llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=4))
    console.print(
        f"Greedy, {max_tokens} tokens each; a model that is done earlier is made to go on. "
        f"[{ACCEPTED_STYLE}]Green[/] tokens were drafted and accepted."
    )
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    comparisons = []
    for scene, llm in zip(SCENES, drafting, strict=True):
        console.rule(f"{scene.title}, one token a step")
        without = answer(plain, scene.prompt, params, console)
        console.rule(f"{scene.title}, with drafts: {scene.drafts}")
        comparison = Comparison(scene, without, answer(llm, scene.prompt, params, console))
        console.print(comparison.verdict())
        comparisons.append(comparison)
    console.print(comparison_table(comparisons))
    if any(comparison.first_difference is not None for comparison in comparisons):
        raise typer.Exit(AUDIT_FAILED)


def answer(llm: LLM, prompt: str, params: SamplingParams, console: Console) -> RequestOutput:
    """Answer a prompt, showing its text as it comes, accepted drafts in green.

    Raises:
        NumericalError: the request failed.
    """
    from sametoken.engine.detokenizer import make_detokenizer
    from sametoken.engine.tokenizer import Tokenizer

    detokenizer = make_detokenizer(Tokenizer(llm.get_tokenizer()), skip_special_tokens=True)
    num_shown = num_accepted = 0
    for output in llm.generate_stream(
        llm.render_chat([{"role": "user", "content": prompt}]), params
    ):
        new_ids = output.outputs[0].token_ids[num_shown:]
        accepted_now = output.metrics.speculation.num_accepted_tokens - num_accepted
        for offset, token_id in enumerate(new_ids):
            _show_piece(console, detokenizer.append(token_id), accepted=offset < accepted_now)
        num_shown += len(new_ids)
        num_accepted += accepted_now
    _show_piece(console, detokenizer.finish() + "\n", accepted=False)
    if output.outputs[0].error is not None:
        raise output.outputs[0].error
    return output


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Speed and acceptance of both runs of every prompt."""
    from rich.table import Table

    table = Table()
    table.add_column("", no_wrap=True)
    for heading in ("tokens", "tokens/s", "acceptance\nlength", "per position", "speed-up"):
        table.add_column(heading, justify="right")
    for comparison in comparisons:
        scene, base = comparison.scene, tokens_per_second(comparison.plain)
        sides = ((scene.title, comparison.plain), (f"  {scene.drafts}", comparison.speculative))
        for name, output in sides:
            rate, speculation = tokens_per_second(output), output.metrics.speculation
            table.add_row(
                name,
                str(len(output.outputs[0].token_ids)),
                f"{rate:.1f}",
                f"{speculation.acceptance_length:.2f}",
                per_position(speculation) if speculation.num_draft_tokens else "-",
                f"{rate / base:.2f}x" if base else "-",
            )
        table.add_section()
    return table


def _show_piece(console: Console, piece: str, *, accepted: bool) -> None:
    console.print(
        piece, end="", style=ACCEPTED_STYLE if accepted else None, markup=False, emoji=False
    )
    console.file.flush()


def _say_nothing(line: str) -> None:
    pass
