"""A tiny random Llama with a byte-level tokenizer and a chat template that knows tools."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.checkpoints import write_llama

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n"), ("e", "r")]
SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- set f = call.function %}
<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
MAX_POSITIONS = 1024
#: Of answers that a random model, too, ends within a few tokens.
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


def write_chat_model(directory: Path, seed: int = 0, **changes) -> Path:
    """A checkpoint directory that ``sametoken serve`` takes."""
    sizes = {
        "vocab_size": vocab_size(),
        "max_position_embeddings": MAX_POSITIONS,
        "eos_token_id": byte_tokenizer().token_to_id(SPECIAL[0]),
    }
    return save_tokenizer(write_llama(directory, seed, **(sizes | changes)))


def save_tokenizer(directory: Path) -> Path:
    """Put the tokenizer and the template beside a checkpoint of ``vocab_size()`` tokens."""
    PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token=SPECIAL[0], chat_template=CHAT_TEMPLATE
    ).save_pretrained(directory)
    return directory


def vocab_size() -> int:
    return byte_tokenizer().get_vocab_size()


def byte_tokenizer(special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """Every byte is a token; a few merges, so that tokens and characters differ."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in MERGES)]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer
