"""The request of vllm#39273 and its speculative config."""

from __future__ import annotations

PROMPT = (
    "<code>\nclass Calculator:\n    def add(self, a, b):\n        return a + b\n</code>\n"
    "<update>\nAdd subtract and multiply methods\n</update>"
)
MAX_TOKENS = 300
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 64,
    "prompt_lookup_max": 10,
    "prompt_lookup_min": 2,
}
