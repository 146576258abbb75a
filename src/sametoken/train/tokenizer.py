"""A new byte-level BPE tokenizer with the ChatML template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sametoken.errors import CheckpointError, ConfigError, in_words

END_OF_TEXT, TURN_BEGIN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_BEGIN, TURN_END)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Every byte is a token.
_LEAST = 256 + len(SPECIAL)
_REMEDY = "put it back beside its checkpoint, or choose another output and leave resume out"


def require_vocab_size(vocab_size: int) -> None:
    """Refuse a vocabulary that cannot hold every byte.

    Raises:
        ConfigError: it cannot.
    """
    if vocab_size < _LEAST:
        raise ConfigError(f"vocab_size={vocab_size} is too small", f"use at least {_LEAST}")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train on texts. Digits are single tokens; every text survives encoding and decoding.

    Args:
        texts: the text to count.
        vocab_size: most tokens, enough for every byte; text with few repetitions gives fewer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        bos_token=END_OF_TEXT,
        additional_special_tokens=[TURN_BEGIN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write tokenizer.json and its companion files.

    Raises:
        ConfigError: the directory cannot be written.
    """
    try:
        tokenizer.save_pretrained(directory)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written ({in_words(error)})", "make room"
        ) from error


def load_trained_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Load what ``save_tokenizer`` wrote.

    Raises:
        ConfigError: the directory holds no tokenizer.
        CheckpointError: it cannot be read.
    """
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(f"{directory} holds no tokenizer.json", _REMEDY)
    try:
        return PreTrainedTokenizerFast.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        # transformers raises errors of many kinds here.
        raise CheckpointError(
            f"{directory} holds no tokenizer that can be read ({error!r})", _REMEDY
        ) from error
