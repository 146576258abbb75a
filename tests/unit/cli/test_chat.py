"""The chat's commands and errors, with a model that repeats its prompt's last message."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import ClassVar

import pytest
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from helpers.cli import invoke
from helpers.full_disk import filling_disk
from sametoken import llm as llm_module
from sametoken.cli.chat import default_drafts
from sametoken.cli.conversation import CALM, COMMANDS, Chat, Consoles
from sametoken.config import DEFAULT_MODEL, EngineConfig, SpeculativeConfig
from sametoken.engine import unloaded as unloaded_module
from sametoken.engine.user_inputs import PromptTokens
from sametoken.errors import EngineDeadError, NumericalError, RequestError, UnsupportedError
from sametoken.serving.http.config import ServerConfig
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from sametoken.types.sampling_params import SamplingParams, derive_seed

CONTEXT = 40


class EchoLLM:
    """Says the last message, a character a token; each step after the first accepts one draft."""

    loaded: ClassVar[list] = []
    template: ClassVar[str | None] = "{{ messages }}"
    recommended: ClassVar[SamplingParams] = SamplingParams()

    def __init__(self, unloaded, announce) -> None:
        self.config = unloaded.config
        self.asked: list = []
        self.fail: BaseException | None = None
        self.resolved = SimpleNamespace(config=self.config, max_model_len=CONTEXT)
        announce(f"loading {self.config.model}")
        self.loaded.append(self)

    @classmethod
    def from_unloaded(cls, unloaded, announce):
        return cls(unloaded, announce)

    @classmethod
    def get_tokenizer(cls):
        backend = Backend(models.BPE({chr(i): i for i in range(33, 127)}, []))
        backend.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=cls.template)

    def get_default_sampling_params(self):
        return self.recommended

    def render_chat(self, messages):
        if messages[-1]["content"] == "refuse":
            raise RequestError("the chat template refuses the messages", "be kind")
        text = "".join(message["content"] for message in messages)
        return PromptTokens(text, tuple(map(ord, text)))

    def generate_stream(self, prompt, params, *, lora_request):
        self.asked.append((prompt.text, params))
        self.adapter = lora_request
        text = prompt.text[-3:]
        metrics = RequestMetrics(0.0, 1.0)
        for end in range(1, len(text) + 1, 2):
            # One token, then windows of two: a draft that was accepted, and the target's own.
            drafts = int(end > 1 and self.config.speculative_config is not None)
            speculation = metrics.speculation + SpeculationMetrics.of([(drafts, drafts)])
            finished = 3.0 if end + 2 > len(text) else None
            metrics = RequestMetrics(0.0, 1.0, finished, 0, speculation)
            said = text[:end]
            error = self.fail if isinstance(self.fail, NumericalError) else None
            completion = CompletionOutput(
                0, said, tuple(map(ord, said)), "stop" if finished else None, error=error
            )
            yield RequestOutput(
                "0", None, prompt.token_ids, (completion,), finished is not None, metrics
            )
            if self.fail is not None and error is None:
                raise self.fail


class Unloaded:
    """What is known of the model before it is loaded."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.inputs = SimpleNamespace(tokenizer=Tokenizer(EchoLLM.get_tokenizer()))

    @classmethod
    def of(cls, config, announce):
        return cls(config)


@pytest.fixture(autouse=True)
def model(monkeypatch):
    monkeypatch.setattr(unloaded_module, "UnloadedModel", Unloaded)
    monkeypatch.setattr(llm_module, "LLM", EchoLLM)
    monkeypatch.setattr(EchoLLM, "loaded", [])
    return EchoLLM


class Talk:
    """A chat that has begun, and what it has shown."""

    def __init__(
        self,
        *,
        generation_config: str = "auto",
        reasoning_parser: str = "auto",
        **sampling,
    ) -> None:
        config = EngineConfig(
            model="m", generation_config=generation_config, speculative_config="ngram"
        )
        self.answers, self.status = io.StringIO(), io.StringIO()
        consoles = Consoles(*(Console(file=f, soft_wrap=True) for f in (self.answers, self.status)))
        reasoning = ServerConfig(reasoning_parser=reasoning_parser)
        self.chat = Chat(config, sampling, reasoning, consoles, interactive=True)
        self.chat.start()

    @property
    def llm(self) -> EchoLLM:
        return EchoLLM.loaded[-1]

    def say(self, *lines: str) -> str:
        """Notices after these lines, as the chat goes on."""
        before = len(self.status.getvalue())
        for line in lines:
            assert self.chat.take(line)
        return self.status.getvalue()[before:]


def test_a_conversation_goes_to_the_model_as_a_whole():
    talk = Talk()
    figures = talk.say("abc")
    talk.say("  ", "xyz")
    assert talk.answers.getvalue() == "abc\nxyz\n"
    assert figures == "[3 tokens, 1.0 tokens/s, 0.50 accepted drafts per step]\n"
    assert [prompt for prompt, _ in talk.llm.asked] == ["abc", "abcabcxyz"]
    roles = [message["role"] for message in talk.chat.messages]
    assert roles == ["user", "assistant", "user", "assistant"]


def test_the_adapter_that_is_named_answers(model):
    words = ["chat", "m", "--lora-modules", "sql=./a", "--lora-request"]
    invoke(*words, "sql", input="abc\n/drafts ngram\n/again\n")
    assert [llm.adapter for llm in model.loaded] == ["sql"] * 2
    model.loaded.clear()
    refused = invoke(*words, "sq", input="abc\n")
    assert (refused.exit_code, model.loaded) == (2, [])
    assert "there is no adapter 'sq'" in refused.stderr


class ThinkingLLM(EchoLLM):
    """Reasons before it says something, both in one step, whose text has all marks."""

    said = "<think>hm</think>yes"

    def generate_stream(self, prompt, params, *, lora_request):
        self.asked.append((prompt.text, params))
        completion = CompletionOutput(0, self.said, tuple(map(ord, self.said)), "stop")
        metrics = RequestMetrics(0.0, 1.0, 3.0)
        yield RequestOutput("0", None, prompt.token_ids, (completion,), True, metrics)


def test_reasoning_is_shown_aside_and_no_part_of_the_conversation(monkeypatch):
    monkeypatch.setattr(llm_module, "LLM", ThinkingLLM)
    talk = Talk(reasoning_parser="qwen3")
    assert talk.say("a").startswith("hm\n\n[20 tokens")
    assert talk.answers.getvalue() == "yes\n"
    assert talk.chat.messages[-1] == {"role": "assistant", "content": "yes"}
    plain = Talk()
    assert plain.say("a").startswith("[20 tokens")
    assert plain.answers.getvalue() == f"{ThinkingLLM.said}\n"


def test_gpt_oss_s_template_chooses_harmony(monkeypatch):
    monkeypatch.setattr(llm_module, "LLM", ThinkingLLM)
    monkeypatch.setattr(EchoLLM, "template", "<|channel|>analysis")
    monkeypatch.setattr(
        ThinkingLLM,
        "said",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
    )
    talk = Talk()
    assert talk.say("a").startswith("hm\n\n[")
    assert talk.answers.getvalue() == "yes\n"
    assert Talk(reasoning_parser="none").say("a").startswith("[")


def test_an_unknown_form_of_reasoning_is_refused_before_the_model_is_loaded(model):
    result = invoke("chat", "m", "--reasoning-parser", "telepathy")
    assert result.exit_code == 2
    assert "reasoning_parser='telepathy' is not possible" in result.stderr
    assert model.loaded == []


def test_impossible_sampling_is_refused_before_the_model_is_loaded(model):
    result = invoke("chat", "m", "--temperature", "200")
    assert "temperature=200.0 is not possible" in result.stderr
    assert model.loaded == []


def test_drafts_change_the_engine_and_not_the_request():
    talk = Talk(temperature=1.0)
    talk.say("abc")
    assert talk.say("/drafts off", "/again").startswith("loading m\nDrafts: off; the model was")
    shown = talk.say("/drafts suffix", "/again", "/drafts")
    assert "Drafts: suffix, up to 24 per step. /drafts [off|ngram|suffix|eagle3|mtp|JSON]" in shown
    specs = [llm.config.speculative_config for llm in EchoLLM.loaded]
    assert specs == [SpeculativeConfig("ngram"), None, SpeculativeConfig("suffix")]
    asked = [llm.asked for llm in EchoLLM.loaded]
    assert asked[0] == asked[1] == asked[2]
    assert len(talk.chat.messages) == 2


def test_methods_that_the_model_cannot_run_with_are_not_offered(monkeypatch):
    talk = Talk()

    def without_a_module(config, announce):
        if config.speculative_config.method in ("eagle3", "mtp"):
            raise UnsupportedError("there is no such head", "use another method")
        return Unloaded(config)

    monkeypatch.setattr(Unloaded, "of", without_a_module)
    assert "/drafts [off|ngram|suffix|JSON] changes them" in talk.say("/drafts")


def test_impossible_drafts_leave_the_engine_as_it_is():
    talk = Talk()
    assert "Did you mean 'ngram'? Use 'ngram', " in talk.say("/drafts ngrm")
    assert len(EchoLLM.loaded) == 1


def test_drafts_that_cannot_be_loaded_are_undone(monkeypatch):
    talk = Talk()

    def refuse(self, unloaded, announce):
        raise UnsupportedError("no such drafter", "take another")

    with monkeypatch.context() as patch:
        patch.setattr(EchoLLM, "__init__", refuse)
        assert talk.say("/drafts suffix") == "error: no such drafter. Take another\n"
    assert "tokens/s" in talk.say("abc")
    assert talk.llm.config.speculative_config == SpeculativeConfig("ngram")


def test_a_seed_belongs_to_a_place_in_the_conversation():
    talk = Talk(seed=7)
    talk.say("a", "b", "/again", "/reset", "a")
    seeds = [params.seed for _, params in talk.llm.asked]
    first, second = derive_seed(7, 1), derive_seed(7, 3)
    assert seeds == [first, second, second, first]


def test_the_system_message_comes_first_and_outlives_a_reset():
    talk = Talk()
    talk.say("/system S.", "abc", "/reset", "abc", "/system", "/reset", "abc")
    assert [prompt for prompt, _ in talk.llm.asked] == ["S.abc", "S.abc", "abc"]


def test_models_that_recommend_nothing_are_calmed(monkeypatch):
    talk = Talk(top_p=0.5)
    talk.say("a")
    assert talk.llm.asked[-1][1].temperature == CALM["temperature"]
    assert talk.llm.asked[-1][1].top_p == 0.5
    monkeypatch.setattr(EchoLLM, "recommended", SamplingParams(max_tokens=99))
    talk = Talk()
    talk.say("a")
    assert talk.llm.asked[-1][1].temperature == CALM["temperature"]
    monkeypatch.setattr(EchoLLM, "recommended", SamplingParams(temperature=0.7))
    talk = Talk()
    talk.say("a")
    assert (talk.llm.asked[-1][1].temperature, talk.llm.asked[-1][1].top_p) == (0.7, 1.0)


def test_who_asks_for_no_file_is_not_calmed():
    talk = Talk(generation_config="vllm")
    talk.say("a")
    assert (talk.llm.asked[-1][1].temperature, talk.llm.asked[-1][1].top_p) == (1.0, 1.0)


def test_a_conversation_is_saved_as_json_or_markdown(tmp_path):
    talk = Talk()
    talk.say("/system S", "abc", f"/save {tmp_path / 'c.json'}", f"/save {tmp_path / 'c.md'}")
    assert json.loads((tmp_path / "c.json").read_text()) == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "abc"},
            {"role": "assistant", "content": "abc"},
        ],
    }
    assert (tmp_path / "c.md").read_text() == (
        "# A chat with m\n\n## System\n\nS\n\n## User\n\nabc\n\n## Assistant\n\nabc\n"
    )


def test_save_overwrites_only_what_it_wrote(tmp_path):
    talk, path = Talk(), tmp_path / "c.md"
    path.write_text("mine")
    assert "exists already. Choose another name" in talk.say(f"/save {path}")
    assert path.read_text() == "mine"
    path.unlink()
    assert "2 messages are saved" in talk.say("abc", f"/save {path}", f"/save {path}")
    assert "Give a name in .json or .md" in talk.say("/save c.txt")
    assert "cannot be written" in talk.say(f"/save {tmp_path / 'no' / 'c.md'}")
    saved = path.read_text()
    with filling_disk():
        assert "no space left" in talk.say("def", f"/save {path}")
    assert path.read_text() == saved


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/rset", "there is no command /rset. Did you mean '/reset'?"),
        ("/xyz", "Known: /again, /drafts"),
        ("/again", "there is no question yet"),
        ("refuse", "error: the chat template refuses the messages. Be kind"),
        ("x" * CONTEXT, "the conversation has 40 tokens and the context holds 40. Send a shorter"),
    ],
)
def test_mistakes_are_told_and_change_nothing(line, hint):
    talk = Talk()
    assert hint in talk.say(line)
    assert talk.chat.messages == []


def test_a_full_context_names_its_remedy():
    talk = Talk()
    talk.say("x" * 30)
    before = talk.chat.messages
    assert "/reset forgets the conversation" in talk.say("y" * 30)
    assert talk.chat.messages == before
    assert "tokens/s" in talk.say("/reset", "y" * 30)


def test_ctrl_c_keeps_what_was_said():
    talk = Talk()
    talk.llm.fail = KeyboardInterrupt()
    assert talk.say("abc") == "[1 tokens, stopped]\n"
    assert talk.chat.messages[-1] == {"role": "assistant", "content": "a"}


def test_an_engine_that_died_is_loaded_again():
    talk = Talk()
    talk.llm.fail = EngineDeadError("the engine stopped", "load it again")
    assert "error: the engine stopped" in talk.say("abc")
    assert talk.chat.messages == []
    assert talk.say("abc").startswith("loading m\n")
    assert len(talk.chat.messages) == 2


def test_an_answer_that_fails_is_no_answer():
    talk = Talk()
    talk.llm.fail = NumericalError("the logits were NaN", "use float32")
    assert "error: the logits were NaN" in talk.say("abc")
    assert talk.chat.messages == []


def test_a_slash_can_be_said_and_quit_ends():
    talk = Talk()
    talk.say("//a")
    assert talk.llm.asked[0][0] == "/a"
    assert not talk.chat.take("/quit")


def test_help_lists_every_command():
    shown = Talk().say("/help")
    assert [line.split()[0] for line in shown.splitlines()] == [*COMMANDS]


def test_a_base_model_is_sent_to_generate_before_it_is_loaded(monkeypatch):
    monkeypatch.setattr(EchoLLM, "template", None)
    with pytest.raises(UnsupportedError, match="m has no chat template") as caught:
        Talk()
    assert caught.value.remedy == "use sametoken generate m --prompt TEXT"
    assert EchoLLM.loaded == []


def test_drafts_that_do_not_fit_leave_the_model_loaded(monkeypatch):
    talk = Talk()

    def refuse(config, announce):
        raise UnsupportedError("no such drafter", "take another")

    monkeypatch.setattr(Unloaded, "of", refuse)
    assert talk.say("/drafts suffix") == "error: no such drafter. Take another\n"
    assert "tokens/s" in talk.say("abc")
    assert len(EchoLLM.loaded) == 1


def test_a_pipe_gets_answers_alone_and_stops_at_an_error():
    result = invoke("chat", "m", "--system", "S", input="abc\n\n/what\nabc\n")
    assert result.exit_code == 2
    assert result.stdout == "abc\n"
    assert "error: there is no command /what" in result.stderr
    assert "You chat" not in result.stderr
    assert invoke("chat", "m", input="a\nb").stdout == "a\naab\n"


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ([], SpeculativeConfig("suffix")),
        (["--speculative-config", "off"], None),
        (["--speculative-config", "null"], None),
    ],
)
def test_drafts_are_on_by_default(given, spec):
    invoke("chat", "m", *given, input="")
    assert EchoLLM.loaded[-1].config.speculative_config == spec
    assert default_drafts(DEFAULT_MODEL) == "eagle3"
