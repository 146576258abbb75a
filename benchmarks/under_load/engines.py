"""The engines of ``drive.py``: both run in this process, with token ids in and out.

Other options than those of ``configs.py`` are at each engine's default, except that vLLM runs
without flashinfer and captures graphs large enough for the windows of a full batch.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from configs import EngineArgs
from workloads import Request

#: Maximum rows of a vLLM step.
VLLM_ROWS = 8192
#: Requests in the batches that vLLM captures, beside as many windows.
CAPTURED = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
#: Rows of the batches that it captures beside those, as by default, up to two a request.
MIXED_ROWS = (320, 384, 448, 512)


class Arrival(NamedTuple):
    """Tokens that a step emitted for a request; may exceed the requested length."""

    request_id: str
    num_tokens: int


class TargetPass(NamedTuple):
    """Multiply-adds per row of a dense target.

    Attributes:
        layers: for every row.
        head: for a row with logits.
        attention: for scores and weighted values, per position attended to.
    """

    layers: int
    head: int
    attention: int


def target_pass(resolved: Any) -> TargetPass:
    """Count the multiply-adds of sametoken's target; with MoE it counts all experts."""
    from sametoken.bench.roofline import step_traffic

    model, itemsize = resolved.model, resolved.dtype.itemsize
    head = model.vocab_size * model.hidden_size
    kv_elements = resolved.request_memory.kv_per_token // resolved.kv_cache_dtype.itemsize
    return TargetPass(
        layers=step_traffic(resolved).weights // itemsize - head,
        head=head,
        # Grouped-query attention: each KV head serves num_heads / num_kv_heads query heads.
        attention=kv_elements * model.num_heads // model.num_kv_heads,
    )


class Engine(Protocol):
    """One engine, loaded."""

    def add(self, request: Request) -> None:
        """Queue a request."""
        ...

    def step(self) -> list[Arrival]:
        """Run, or wait for, a step."""
        ...

    def end(self, request_id: str) -> None:
        """Finish a request that has all its tokens."""
        ...

    def abort(self, request_id: str) -> None:
        """Abort a request, which may be unknown."""
        ...

    def rest(self) -> None:
        """Process the remaining output of finished requests."""
        ...

    def drafts(self) -> tuple[int, int]:
        """Return the offered and accepted drafts so far."""
        ...

    def without_repeats(self) -> contextlib.AbstractContextManager[str]:
        """Change random weights so that outputs repeat no token, if possible; yields a note."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return facts for the results file and for the floors."""
        ...


class Sametoken:
    """This engine's core: its steps run in the calling thread."""

    def __init__(self, engine_args: EngineArgs) -> None:
        from sametoken.config import EngineConfig
        from sametoken.engine.input_processor import InputProcessor, PromptTokens
        from sametoken.text.tokenizer import load_tokenizer_of

        build = importlib.import_module("sametoken.engine.build")
        load = importlib.import_module("sametoken.engine.load")
        options = (
            engine_args.options("sametoken") | {"device": engine_args.device} | engine_args.more
        )
        config = EngineConfig.from_options(**options)
        # Keep the target: ``without_repeats`` rotates the rows of its head.
        load_model, loaded = load.load_model, []

        def keep(*args: Any, **named: Any) -> Any:
            loaded.append(load_model(*args, **named))
            return loaded[-1]

        load.load_model = keep
        try:
            self._core = build.build_engine(config, print)
        finally:
            load.load_model = load_model
        self._head = loaded[0].head
        resolved = self._core.resolved
        self._prompt = PromptTokens
        self._inputs = InputProcessor(
            load_tokenizer_of(resolved.config, resolved.model_path),
            vocab_size=resolved.model.vocab_size,
            max_model_len=resolved.max_model_len,
            eos_token_ids=resolved.model.eos_token_ids,
            num_speculative_tokens=resolved.config.num_speculative_tokens,
            seed=0,
        )
        self._num_drafts = self._num_accepted = 0

    def add(self, request: Request) -> None:
        from sametoken.types.sampling_params import SamplingParams
        from sametoken.types.structured_outputs import StructuredOutputs

        sampling = {"temperature": 0.0, **request.sampling}
        if schema := sampling.pop("grammar", None):
            sampling["structured_outputs"] = StructuredOutputs(json_schema=schema)
        params = SamplingParams(
            max_tokens=request.output_len, ignore_eos=True, detokenize=False, **sampling
        )
        prompt = self._prompt(None, request.prompt)
        (one,) = self._inputs.process(request.request_id, prompt, params).completions
        self._core.add_request(one)

    def step(self) -> list[Arrival]:
        arrived = []
        for update in self._core.step():
            if update.failed:
                raise RuntimeError(f"{update.request_id} was poisoned ({update.mask_fault!r})")
            self._num_drafts += update.num_drafts
            self._num_accepted += update.num_accepted
            if update.token_ids:
                arrived.append(Arrival(update.request_id, len(update.token_ids)))
        return arrived

    def end(self, request_id: str) -> None:
        self._core.release(request_id)

    def abort(self, request_id: str) -> None:
        self._core.release(request_id, aborted=True)

    def rest(self) -> None:
        while self._core.has_unfinished:
            self._core.step()

    def drafts(self) -> tuple[int, int]:
        return self._num_drafts, self._num_accepted

    @contextlib.contextmanager
    def without_repeats(self) -> Iterator[str]:
        """Make the next id, not itself, each token's likeliest successor inside the block."""
        matrix = getattr(self._head, "matrix", None)
        if matrix is None:
            yield "outputs repeat: the head's weights are packed"
            return
        matrix.copy_(matrix.roll(1, 0))
        try:
            yield "outputs do not repeat: the head's rows were turned by one"
        finally:
            matrix.copy_(matrix.roll(-1, 0))

    def facts(self) -> dict[str, Any]:
        import torch

        from sametoken.bench.roofline import DraftPass, draft_pass, step_traffic

        resolved = self._core.resolved
        target, traffic = target_pass(resolved), step_traffic(resolved)
        speculation = resolved.config.speculative_config
        drafter = DraftPass(0, 0)
        if speculation:
            drafter = draft_pass(speculation, resolved.model, resolved.model_path)
        return {
            "torch": torch.__version__,
            "synthetic_rates": speculation.synthetic_rates if speculation else None,
            "num_kv_blocks": resolved.num_kv_blocks,
            "max_num_batched_tokens": resolved.config.max_num_batched_tokens,
            "layers": target.layers,
            "head": target.head,
            "attention": target.attention,
            "weights": traffic.weights + traffic.draft_weights,
            "kv": traffic.kv_per_token,
            "recurrent": traffic.recurrent_per_request,
            "fusion": drafter.fusion,
            "draft_layers": drafter.layers + drafter.experts,
            "draft_head": drafter.head,
            "k": resolved.config.num_speculative_tokens,
        }


def weights_as_ours(model: Any) -> None:
    """Change vLLM's random weights to the distributions of ours, in place.

    Its own are at most 0.001. In float8 they are zeros, and packed integers are what memory held:
    products of zeros draw less power, so a chip at its power limit is faster. Of routers they are
    next to equal: all rows would choose the same few experts, and a step would read few of them.
    Its workers look it up by its name.
    """
    import torch

    for name, tensor in model.state_dict().items():
        if name.endswith("weight_packed"):
            bits = torch.iinfo(tensor.dtype)
            tensor.random_(bits.min, bits.max)
        elif "norm" in name and tensor.dim() == 1:
            tensor.fill_(1)
        elif name.endswith("e_score_correction_bias"):
            tensor.zero_()
        elif name.endswith(("weight_scale", "weight_scale_inv")):
            tensor.fill_(1 if ".gate." in name else 1e-3)
        elif tensor.is_floating_point() and tensor.dim() > 1:
            size = 1e-3
            if name.endswith((".gate.weight", ".router.weight")):
                size = tensor.shape[1] ** -0.5
            elif tensor.itemsize == 1 or "embed_tokens" in name or "lm_head" in name:
                size = 1
            values = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
            tensor.copy_(values.normal_(0, size))


def _random_mxfp4_experts() -> None:
    """Have vLLM fill gpt-oss's experts, which are zeros, before it orders them for its kernels."""
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

    order = GptOssMxfp4MoEMethod.process_weights_after_loading

    def fill_and_order(self: Any, layer: Any) -> None:
        for name in ("w13", "w2"):
            getattr(layer, f"{name}_weight").data.random_(0, 256)
            # 2^-10, about the 1e-3 of other weights.
            getattr(layer, f"{name}_weight_scale").data.fill_(117)
        order(self, layer)

    GptOssMxfp4MoEMethod.process_weights_after_loading = fill_and_order


class VLLM:
    """vLLM's engine behind its ``LLM``, in the process mode that its environment sets.

    Requests have no seeds, because vLLM creates a generator for each seeded request.
    """

    def __init__(self, engine_args: EngineArgs) -> None:
        from vllm import LLM

        options = engine_args.options("vllm")
        k = (options.get("speculative_config") or {}).get("num_speculative_tokens", 0)
        sizes = {size for size in CAPTURED if size <= engine_args.max_num_seqs}
        sizes |= {size * (k + 1) for size in sizes}
        sizes |= {size for size in MIXED_ROWS if size <= 2 * engine_args.max_num_seqs}
        options |= {
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.05,
            "max_num_batched_tokens": VLLM_ROWS,
            "attention_backend": "FLASH_ATTN",
            "seed": 0,
            # Draft counters are part of vLLM's statistics.
            "disable_log_stats": k == 0,
            "cudagraph_capture_sizes": sorted(sizes),
        }
        if engine_args.config.startswith("q35"):
            options |= {
                "language_model_only": True,
                "additional_config": {"gdn_prefill_backend": "triton"},
            }
        if engine_args.config.startswith("glm"):
            # Latent attention has backends of its own.
            del options["attention_backend"]
        if engine_args.config.startswith("graniteh"):
            # transformers gives layers' types names that vLLM 0.24 does not know.
            types = engine_args.model_config["layer_types"]
            options["hf_overrides"] = {"layer_types": types}
        if engine_args.config.startswith("gptoss"):
            # Its engine's process is forked from this one.
            _random_mxfp4_experts()
        self._llm = LLM(**(options | engine_args.more))
        self._llm.apply_model(weights_as_ours)
        self._engine = self._llm.llm_engine
        self._has_drafts = k > 0

    def add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        sampling = {"temperature": 0.0, **request.sampling}
        if schema := sampling.pop("grammar", None):
            sampling["structured_outputs"] = StructuredOutputsParams(json=schema)
        params = SamplingParams(
            max_tokens=request.output_len,
            ignore_eos=True,
            detokenize=False,
            # The default would return each request's whole output at every step.
            output_kind=RequestOutputKind.DELTA,
            **sampling,
        )
        prompt = {"prompt_token_ids": list(request.prompt)}
        self._engine.add_request(request.request_id, prompt, params)

    def step(self) -> list[Arrival]:
        outputs = self._engine.step()
        arrived = ((one.request_id, len(one.outputs[0].token_ids)) for one in outputs)
        return [Arrival(request_id, count) for request_id, count in arrived if count]

    def end(self, request_id: str) -> None:
        """Do nothing: vLLM finishes requests itself."""

    def abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])

    def rest(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def drafts(self) -> tuple[int, int]:
        if not self._has_drafts:
            return 0, 0
        found = {one.name: getattr(one, "value", 0) for one in self._llm.get_metrics()}
        names = ("num_draft_tokens", "num_accepted_tokens")
        offered, accepted = (found.get(f"vllm:spec_decode_{name}", 0) for name in names)
        return int(offered), int(accepted)

    def without_repeats(self) -> contextlib.AbstractContextManager[str]:
        return contextlib.nullcontext("weights are vLLM's own: see the drafts accepted")

    def facts(self) -> dict[str, Any]:
        import os

        import torch
        import vllm

        config = self._engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "v2_runner": getattr(config, "use_v2_model_runner", None),
            "multiprocessing": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "default"),
        }


ENGINES = {"sametoken": Sametoken, "vllm": VLLM}
