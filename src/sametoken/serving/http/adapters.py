"""Requests by which LoRA adapters come and go, with vLLM's paths and fields.

They are answered if ``allow_runtime_lora_updating`` is set (docs/operating.md).
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from sametoken.serving.http.rollout_schemas import Text
from sametoken.serving.http.rollouts import control_router, require_no_model
from sametoken.serving.http.served import Served
from sametoken.serving.http.unions import Strict


class LoadRequest(Strict):
    """An adapter in PEFT's format; ``load_inplace``: one of its name may be there."""

    lora_name: Text
    lora_path: Text
    load_inplace: bool = False


class UnloadRequest(Strict):
    """An adapter by its name; ``lora_int_id`` is vLLM's number of it, and is not read."""

    lora_name: Text
    lora_int_id: int | None = None


def adapter_routes(served: Served) -> APIRouter:
    """The routes by which adapters come and go."""
    adapters, router = served.engine.adapters, control_router(served, "/v1")

    @router.post("/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadRequest) -> str:
        """Read an adapter beside the requests that run; later ones may choose it."""
        require_no_model(served, body.lora_name)
        await adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @router.post("/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadRequest) -> str:
        """No further request has the adapter; unfinished ones keep it until they end."""
        await adapters.unload(body.lora_name)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    return router
