"""The conversation of ``sametoken chat``: its answers, and the commands that change it."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken.cli.report import tokens_per_second
from sametoken.cli.streaming import ACCEPTED_STYLE, content_of, shown
from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.errors import (
    ConfigError,
    EngineDeadError,
    RequestError,
    SametokenError,
    UnsupportedError,
)
from sametoken.io.files import write_text
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.parsed import Parser, parse_nothing
from sametoken.serving.http.reasoning_parsers import (
    REASONING_FORMS,
    ComingAnswer,
    RenderedPrompt,
    with_marks,
)
from sametoken.serving.http.tool_parsers import parser_of_template
from sametoken.types.lora_modules import require_adapter
from sametoken.types.option_values import NO_FILE, suggestion
from sametoken.types.outputs import RequestOutput
from sametoken.types.sampling_params import SamplingParams, derive_seed
from sametoken.types.speculative_methods import DRAFTING, TABLE, Checkpoint

if TYPE_CHECKING:
    from rich.console import Console

    from sametoken.engine.user_inputs import PromptTokens
    from sametoken.llm import LLM

OFF = "off"
#: For models that recommend nothing, as GGUF files: what SmolLM2's card gives. At temperature 1
#: small models ramble. ``--generation-config vllm`` asks for vLLM's defaults instead.
CALM = {"temperature": 0.2, "top_p": 0.9}
#: Methods that may be given by name alone.
_METHODS = [name for name in DRAFTING if TABLE[name].checkpoint is not Checkpoint.REQUIRED]
_FORMATS = (".json", ".md")


@dataclass(frozen=True, slots=True)
class Consoles:
    """Where answers go, and where everything else does."""

    answers: Console
    status: Console


class Chat:
    """A conversation with a model, and the commands that change it.

    Tokens are a function of the conversation, the sampling parameters and the seed alone: the
    seed of an answer comes from its place in the conversation, so that the same question gets the
    same answer with any drafts.

    Args:
        config: the engine's options.
        sampling: sampling parameters that replace the model's recommended ones.
        reasoning: has ``reasoning_parser``.
        consoles: where answers go, and where their reasoning and notices do.
        adapter: the name of the adapter that answers; None: the model itself.
        interactive: whether a person is at the terminal. If not, every error ends the chat.
    """

    def __init__(
        self,
        config: EngineConfig,
        sampling: Mapping[str, Any],
        reasoning: ServerConfig,
        consoles: Consoles,
        adapter: str | None = None,
        *,
        interactive: bool,
    ) -> None:
        require_adapter(config.lora_modules, adapter)
        self._config, self._adapter = config, adapter
        self._sampling = sampling
        self._reasoning = reasoning
        self._consoles = consoles
        self._interactive = interactive
        self._system: list[dict[str, str]] = []
        self._turns: list[dict[str, str]] = []
        self._saved: set[Path] = set()
        self._llm: LLM | None = None
        # What is impossible is refused before the model is loaded.
        self._params = SamplingParams(**sampling)
        self._is_over = False

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation: the system message if there is one, then questions and answers."""
        return self._system + self._turns

    def set_system(self, text: str) -> None:
        """Set the system message; an empty one removes it."""
        self._system = [{"role": "system", "content": text}] if text else []

    def start(self) -> None:
        """Load the model and greet.

        Raises:
            UnsupportedError: the model has no chat template.
            SametokenError: as ``LLM``.
        """
        llm = self._load()
        recommended = llm.get_default_sampling_params()
        reads_file = self._config.generation_config != NO_FILE
        usual = SamplingParams(max_tokens=recommended.max_tokens)
        calm = CALM if reads_file and recommended == usual else {}
        self._params = replace(recommended, **{**calm, **self._sampling})
        if self._interactive:
            self._say(f"You chat with {self._config.model}.", markup=False)
            self._say(
                f"[{ACCEPTED_STYLE}]Green[/] words were drafted and accepted: they came faster, "
                "and no draft changes a word. /help lists the commands, Ctrl-C stops an answer, "
                "Ctrl-D leaves."
            )

    def take(self, line: str) -> bool:
        """Answer a line or run its command; returns whether the chat goes on.

        Raises:
            SametokenError: something failed, and no person is there to read about it.
            KeyboardInterrupt: likewise.
        """
        text = line.strip()
        try:
            if text.startswith("/") and not text.startswith("//"):
                self._command(text)
            elif text:
                self._ask(self._turns, text.removeprefix("/"))
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._say("Stopped.")
        except SametokenError as error:
            if not self._interactive:
                raise
            self._say(f"error: {error}", style="red", markup=False)
            if isinstance(error, EngineDeadError):
                # Loaded again by the next question.
                self._llm = None
        return not self._is_over

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        if name not in COMMANDS:
            raise ConfigError(f"there is no command {name}", suggestion(name, [*COMMANDS]))
        COMMANDS[name].run(self, argument.strip())

    def _ask(self, before: list[dict[str, str]], question: str) -> None:
        """Answer a question after these turns; without an answer the conversation stays."""
        asked = [*before, {"role": "user", "content": question}]
        answer = self._answer(asked)
        if answer is not None:
            self._turns = [*asked, {"role": "assistant", "content": answer}]

    def _answer(self, turns: list[dict[str, str]]) -> str | None:
        """Stream the answer to the last turn; Ctrl-C ends it where it is, None without a token."""
        llm = self._llm or self._load()
        prompt = llm.render_chat(self._system + turns)
        longest = llm.resolved.max_model_len
        if len(prompt.token_ids) >= longest:
            raise RequestError(
                f"the conversation has {len(prompt.token_ids)} tokens and the context holds "
                f"{longest}",
                "/reset forgets the conversation, and /save FILE keeps a copy of it"
                if len(turns) > 1
                else "send a shorter message",
            )
        seed = derive_seed(self._params.seed or 0, len(turns))
        params, parser = self._reads(llm, replace(self._params, seed=seed), prompt)
        tokenizer, status = llm.get_tokenizer(), self._consoles.status
        output: RequestOutput | None = None
        stopped = False
        answers = llm.generate_stream(prompt, params, lora_request=self._adapter)
        with contextlib.closing(answers) as outputs:  # type: ignore[type-var]
            try:
                marks = not params.skip_special_tokens
                for latest in shown(
                    outputs, tokenizer, self._consoles.answers, parser, status, marks=marks
                ):
                    output = latest
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                stopped = True
        self._consoles.answers.print()
        if output is None:
            return None
        if output.outputs[0].error is not None:
            raise output.outputs[0].error
        self._say(f"[{_figures(output, longest, stopped=stopped)}]", style="dim", markup=False)
        return content_of(parser(output.outputs[0].text, True))

    def _reads(
        self, llm: LLM, params: SamplingParams, prompt: PromptTokens
    ) -> tuple[SamplingParams, Parser]:
        """Parameters and the parser of an answer, which may reason before its content."""
        from sametoken.text.tokenizer import Tokenizer

        tokenizer = Tokenizer(llm.get_tokenizer())
        _, name = self._reasoning.parsers(parser_of_template(tokenizer.chat_template))
        if name is None:
            return params, parse_nothing
        form = REASONING_FORMS[name]
        rendered = RenderedPrompt(prompt.text or "")
        answer = ComingAnswer(rendered, parse_nothing, shows_marks=False)
        return with_marks(params, form, tokenizer, ()), form.parser(answer)

    def again(self, argument: str) -> None:
        """Answer the last question again."""
        if not self._turns:
            raise ConfigError("there is no question yet", "ask one")
        *before, question, _ = self._turns
        self._ask(before, question["content"])

    def drafts(self, argument: str) -> None:
        """Show how drafts are made, or load the model again with other ones."""
        if not argument:
            others = "|".join((OFF, *filter(self._may_draft_by, _METHODS), "JSON"))
            self._say(
                f"Drafts: {self._drafts_shown()}. /drafts [{others}] changes them.", markup=False
            )
            return
        spec = None if argument == OFF else SpeculativeConfig.parse(argument)
        former, self._config = self._config, replace(self._config, speculative_config=spec)
        start = time.monotonic()
        try:
            self._load()
        except BaseException:
            self._config = former
            raise
        took = time.monotonic() - start
        self._say(f"Drafts: {self._drafts_shown()}; the model was loaded again in {took:.1f} s.")

    def system(self, argument: str) -> None:
        """Set or remove the system message."""
        self.set_system(argument)
        self._say("The system message is set." if argument else "There is no system message.")

    def reset(self, argument: str) -> None:
        """Forget questions and answers; the system message stays."""
        self._turns = []
        self._say("The conversation is forgotten; the system message stays.")

    def save(self, argument: str) -> None:
        """Write the conversation to a JSON or Markdown file."""
        path = Path(argument).expanduser()
        if path.suffix not in _FORMATS:
            raise ConfigError(
                f"/save {argument} does not tell the format", "give a name in .json or .md"
            )
        if path.exists() and path.resolve() not in self._saved:
            raise ConfigError(f"{path} exists already", "choose another name")
        as_text = _as_json if path.suffix == ".json" else _as_markdown
        write_text(path, as_text(self._config.model, self.messages))
        self._saved.add(path.resolve())
        self._say(f"{len(self.messages)} messages are saved in {path}.", markup=False)

    def help(self, argument: str) -> None:
        """List the commands."""
        width = max(len(f"{name} {command.argument}") for name, command in COMMANDS.items())
        for name, command in COMMANDS.items():
            left = f"{name} {command.argument}"
            self._say(f"{left:<{width}}  {command.text}", markup=False)

    def quit(self, argument: str) -> None:
        """End the chat."""
        self._is_over = True

    def _load(self) -> LLM:
        """Load the model by the current config, after freeing the one before."""
        from sametoken.engine.unloaded import UnloadedModel
        from sametoken.llm import LLM

        unloaded = UnloadedModel.of(self._config, self._announce)
        tokenizer = unloaded.inputs.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise UnsupportedError(
                f"{self._config.model} has no chat template: it continues texts, and was not "
                "trained to answer",
                f"use sametoken generate {self._config.model} --prompt TEXT",
            )
        self._llm = None
        gc.collect()
        self._llm = LLM.from_unloaded(unloaded, self._announce)
        return self._llm

    def _may_draft_by(self, method: str) -> bool:
        """Whether the model runs with a method by its name alone."""
        from sametoken.engine.unloaded import UnloadedModel

        spec = SpeculativeConfig.parse(method)
        try:
            UnloadedModel.of(replace(self._config, speculative_config=spec), lambda line: None)
        except SametokenError:
            return False
        return True

    def _drafts_shown(self) -> str:
        spec = (self._llm or self._load()).resolved.config.speculative_config
        return f"{spec.label}, up to {spec.num_speculative_tokens} per step" if spec else OFF

    def _announce(self, line: str) -> None:
        self._say(line, markup=False, style="dim")

    def _say(self, text: str, **options: Any) -> None:
        self._consoles.status.print(text, emoji=False, **options)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the chat: the form of its argument, a sentence for /help, and its method."""

    argument: str
    text: str
    run: Callable[[Chat, str], None]


COMMANDS: Mapping[str, Command] = {
    "/again": Command("", "Answers the last question again; drafts change no word.", Chat.again),
    "/drafts": Command(
        "[off|METHOD|JSON]",
        "Loads the model again with these drafts; JSON as for --speculative-config.",
        Chat.drafts,
    ),
    "/system": Command("[TEXT]", "Sets the system message, or removes it.", Chat.system),
    "/reset": Command("", "Forgets the conversation, not the system message.", Chat.reset),
    "/save": Command("FILE", "Writes the conversation to a .json or .md file.", Chat.save),
    "/help": Command("", "Lists the commands. // at the start sends a /.", Chat.help),
    "/quit": Command("", "Leaves, as Ctrl-D does.", Chat.quit),
}


def _figures(output: RequestOutput, longest: int, *, stopped: bool) -> str:
    """An answer's tokens, speed, acceptance, and why it is cut short if it is."""
    completion, speculation = output.outputs[0], output.metrics.speculation
    num_tokens = len(completion.token_ids)
    parts = [f"{num_tokens} tokens"]
    if not stopped:
        parts.append(f"{tokens_per_second(output):.1f} tokens/s")
    if speculation.num_draft_tokens:
        accepted = speculation.num_accepted_tokens / speculation.num_steps
        parts.append(f"{accepted:.2f} accepted drafts per step")
    if stopped:
        parts.append("stopped")
    elif completion.finish_reason == "length":
        is_full = len(output.prompt_token_ids) + num_tokens >= longest
        parts.append("the context is full: /reset forgets it" if is_full else "cut by --max-tokens")
    return ", ".join(parts)


def _as_json(model: str, messages: list[dict[str, str]]) -> str:
    return json.dumps({"model": model, "messages": messages}, ensure_ascii=False, indent=2) + "\n"


def _as_markdown(model: str, messages: list[dict[str, str]]) -> str:
    parts = [f"# A chat with {model}"]
    for message in messages:
        parts += [f"## {message['role'].capitalize()}", message["content"]]
    return "\n\n".join(parts) + "\n"
