"""A small byte-level tokenizer and an engine that emits what the test wrote down."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from sametoken.config import EngineConfig
from sametoken.engine.live_adapters import NoLiveAdapters
from sametoken.engine.resolve import ResolvedConfig
from sametoken.errors import EngineDeadError
from sametoken.llm import LLM
from sametoken.models.base import ModelConfig
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.request import EngineRequest, RequestUpdate

CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "def add(left, right):\n    return left + right\n",
    "Guten Tag, schöne Grüße! 日本語 の 文 🎉🎉 stop stop STOP",
]
TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|end|>{% endif %}"
)
MAX_MODEL_LEN = 64


def trained_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<plain token>", special=False, normalized=False)])
    return backend


@pytest.fixture(scope="session")
def backend() -> Backend:
    return trained_backend()


@pytest.fixture(scope="session")
def tokenizer(backend) -> Tokenizer:
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, eos_token="<|end|>"
    )
    return Tokenizer(hf)


@pytest.fixture(scope="session")
def resolved(tokenizer) -> ResolvedConfig:
    config = EngineConfig(model="nowhere", block_size=16)
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=len(tokenizer.hf),
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=MAX_MODEL_LEN,
        rope={},
        tie_word_embeddings=True,
        attention_bias=False,
        eos_token_ids=(0,),
        bos_token_id=None,
        dtype=torch.float32,
        extra={},
    )
    return ResolvedConfig(
        config=config,
        model_path=Path("nowhere"),
        model=model,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=8,
        usual_rows=2048,
        kernels="none",
        attention_kernels="none",
        reasons={"dtype": "the checkpoint is fp32"},
        weights_bytes=1,
        kv_bytes=1,
    )


class ScriptedEngine:
    """Emits each request's script, one window a step; results lag by ``lag`` steps."""

    upkeep = SimpleNamespace(is_sleeping=False)
    adapters = NoLiveAdapters()

    def __init__(self, resolved: ResolvedConfig, windows, lag: int = 0) -> None:
        self.resolved = resolved
        self.windows = [list(script) for script in windows]
        self.lag = lag
        self.requests: list[EngineRequest] = []
        self.released: list[str] = []
        self.num_kept: dict[str, int | None] = {}
        self.refuse: dict[int, Exception] = {}
        self.num_steps = 0
        self._dead = False
        self._live: dict[str, deque] = {}
        self._in_flight: deque = deque()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live) or bool(self._in_flight) or self._dead

    def add_request(self, request: EngineRequest) -> None:
        if len(self.requests) in self.refuse:
            raise self.refuse[len(self.requests)]
        self._live[request.request_id] = deque(self.windows[len(self.requests)])
        self.requests.append(request)

    def release(
        self, request_id: str, num_kept_tokens: int | None = None, *, aborted: bool = False
    ) -> None:
        self.released.append(request_id)
        self.num_kept[request_id] = num_kept_tokens
        self._live.pop(request_id, None)

    def stop(self, cause: BaseException) -> None:
        self._dead = True

    def step(self) -> tuple[RequestUpdate, ...]:
        self.begun = () if self.num_steps else tuple(self._live)
        self.num_steps += 1
        if self._dead:
            raise EngineDeadError("the engine stopped before")
        if self._live:
            self._in_flight.append(
                tuple(self._update(name, script) for name, script in self._live.items() if script)
            )
        if not self._live or len(self._in_flight) > self.lag:
            return self._in_flight.popleft()
        return ()

    def _update(self, request_id: str, script: deque) -> RequestUpdate:
        window = script.popleft()
        if isinstance(window, BaseException):
            self._dead = True
            raise window
        if isinstance(window, RequestUpdate):
            return window._replace(request_id=request_id)
        drafts = len(window) - 1
        return RequestUpdate(request_id, tuple(window), drafts, drafts, True, 0)


@pytest.fixture
def scripted(resolved, tokenizer):
    """Builds an LLM over a script: for each request in order, its windows."""

    def build(*windows, lag=0, with_tokenizer=True, **changes):
        engine = ScriptedEngine(dataclasses.replace(resolved, **changes), windows, lag)
        return LLM.from_engine(engine, tokenizer if with_tokenizer else None), engine

    return build
