"""Engines over the trained hybrids of the repository, and requests of real text for them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from helpers import calculator
from helpers.harness import Ran, request, run
from helpers.spoilt import make_stream
from helpers.static_steps import in_steps
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.core import EngineCore
from sametoken.models.names import checkout_directory
from sametoken.text.tokenizer import load_tokenizer

#: Five drafts, in a batch as alone.
MTP = {"method": "mtp", "num_speculative_tokens": 5, "draft_limits": "fixed"}
TEXTS = (
    calculator.PROMPT,
    "    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n\n    def",
    "<|im_start|>user\nRepeat this code.\n\n```python\ndef scale(a, b):\n    return a * b\n```"
    "<|im_end|>\n<|im_start|>assistant\n",
    "import numpy as np\n\n\nclass Stack:\n",
    "def __init__(self, name, size=None):\n    self.name = name\n",
)


def trained(
    name: str, speculative_config: dict | None = None, *, device: str = "late", **options
) -> EngineCore:
    """Three slots, chunks of one block; ``device`` is a kind of ``make_stream``."""
    sizes = {"max_num_seqs": 3, "max_model_len": 256, "prefill_chunk_size": 16}
    core = build_engine(
        EngineConfig.from_options(
            model=str(checkout_directory(name)),
            device="cpu",
            speculative_config=speculative_config,
            **sizes | options,
        )
    )
    core._runner = replace(in_steps(core._runner), stream=make_stream(device))
    return core


def encoded(name: str, text: str) -> list[int]:
    return load_tokenizer(checkout_directory(name)).hf.encode(text)


def text_requests(name: str):
    """Prompts of up to three chunks, answers of uneven lengths; every other one is sampled."""
    return [
        request(f"r{i}", encoded(name, text), 8 + 4 * i, temperature=0.8 * (i % 2), seed=i)
        for i, text in enumerate(TEXTS)
    ]


@cache
def plain(name: str) -> Ran:
    return run(trained(name), text_requests(name))
