"""vLLM's flags as command-line options, and the page that lists them (docs/vllm-flags.md)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from sametoken.cli.sections import SectionedCommand
from sametoken.cli.vllm_words import OTHER_NAMES, our_words
from sametoken.errors import MAX_SHOWN, clipped
from sametoken.serving.http.config import ServerConfig
from sametoken.types.vllm_options import SHORT_FLAGS, VLLM_OPTIONS, VllmOptions

#: vLLM's flags with the same meaning here.
_SAME = """
    model revision tokenizer chat_template generation_config dtype device seed load_format
    max_model_len max_num_seqs max_num_batched_tokens block_size kv_cache_dtype
    kv_cache_memory_bytes gpu_memory_utilization num_gpu_blocks_override
    enable_prefix_caching enforce_eager
    swap_space kv_offloading_size tensor_parallel_size disable_custom_all_reduce
    speculative_config max_logprobs logprobs_mode
    enable_return_routed_experts lora_modules enable_lora max_loras max_lora_rank
    host port api_key served_model_name allowed_origins root_path ssl_certfile ssl_keyfile
    tool_call_parser reasoning_parser structured_outputs_config weight_transfer_config
    uvicorn_log_level disable_uvicorn_access_log disable_log_stats shutdown_timeout config
"""
SAME = tuple(_SAME.split())


def _names(options: VllmOptions) -> tuple[str, ...]:
    return tuple(name for name in options.names if name not in ServerConfig.__slots__)


#: The table with the names that serve takes from it; others are options of its own.
TABLE = tuple((options, names) for options in VLLM_OPTIONS if (names := _names(options)))


def flag(name: str) -> str:
    """The flag of an option's name."""
    return f"--{name.replace('_', '-')}"


def as_flag(name: str, value: object) -> str:
    """An option as on the command line."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    return f"{flag(name)} {clipped(str(value), MAX_SHOWN)}"


class ServeCommand(SectionedCommand):
    """A command that reads vLLM's forms of a command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        return super().parse_args(ctx, our_words(args))


def vllm_options() -> list[inspect.Parameter]:
    """One hidden option per flag of the table, None where it is not given."""
    return [
        _parameter(name, is_switch=name in options.switches)
        for options, names in TABLE
        for name in names
    ]


def _parameter(name: str, *, is_switch: bool) -> inspect.Parameter:
    flags = [flag(name), *SHORT_FLAGS.get(name, ())]
    if is_switch:
        flags[0] += f"/{as_flag(name, False)}"
    kind: Any = bool | None if is_switch else str | None
    option = typer.Option(*flags, hidden=True)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


_PAGE = """\
# vLLM's flags

Written by `python -m sametoken.cli.vllm_flags > docs/vllm-flags.md`, of the table that
`sametoken serve` reads (`src/sametoken/types/vllm_options.py`).

## The same here

{same}.

`--served-model-name A B`, `--api-key A B` and `--lora-modules A=PATH B=PATH` take
several values where the model stands first or is named by `--model`; these and other
options of several values may be given once for each. An adapter may also be JSON with
`name` and `path`. Whole numbers may be written as `32k` (32000), `32K` (32768), `4G` or
`4GiB`.

Names may have underscores for dashes. Keys of an option in JSON may be given one by one,
as in `--speculative-config.method ngram`, which has short forms too: {other_names}.
`--max-model-len auto` and `-1` are the default, the longest that fits.

## Accepted without effect

One line on stderr names those that were given, with the reasons. `LLM` takes the same
names as keyword arguments (`trust_remote_code=True`) and logs that line as a warning.

| flags | why |
|---|---|
{without_effect}

## Refused

Values that describe what happens here anyway are accepted like the flags above.

| flags | accepted | why | instead |
|---|---|---|---|
{refused}
"""


def page() -> str:
    """The text of docs/vllm-flags.md."""
    without_effect, refused = [], []
    for options, names in TABLE:
        if options.instead:
            accepted = _quoted(map(str, options.accepted))
            refused.append(f"| {_flags(names)} | {accepted} | {options.why} | {options.instead} |")
        else:
            without_effect.append(f"| {_flags(names)} | {options.why} |")
    return _PAGE.format(
        same=_quoted(map(flag, SAME)),
        other_names=_quoted(OTHER_NAMES),
        without_effect="\n".join(without_effect),
        refused="\n".join(refused),
    )


def _flags(names: tuple[str, ...]) -> str:
    return _quoted(text for name in names for text in (*SHORT_FLAGS.get(name, ()), flag(name)))


def _quoted(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


if __name__ == "__main__":
    typer.echo(page(), nl=False)
