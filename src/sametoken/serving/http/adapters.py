"""Requests by which LoRA adapters come and go, with vLLM's paths and fields.

They are answered if ``allow_runtime_lora_updating`` is set (docs/operating.md).
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import PlainTextResponse
from pydantic import Field

from sametoken.serving.http.body import JsonRoute
from sametoken.serving.http.rollouts import CONTROL_ERRORS, require_no_model, require_no_page
from sametoken.serving.http.served import Served
from sametoken.serving.http.unions import Strict

_Text = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadRequest(Strict):
    """An adapter in PEFT's format; ``load_inplace``: one of its name may be there."""

    lora_name: _Text
    lora_path: _Text
    load_inplace: bool = False


class UnloadRequest(Strict):
    """An adapter by its name; ``lora_int_id`` is vLLM's number of it, and is not read."""

    lora_name: _Text
    lora_int_id: int | None = None


def adapter_routes(served: Served) -> APIRouter:
    """The routes by which adapters come and go."""
    dependencies = [] if served.config.api_key else [Depends(require_no_page)]
    router = APIRouter(
        prefix="/v1", responses=CONTROL_ERRORS, route_class=JsonRoute, dependencies=dependencies
    )
    adapters = served.engine.adapters

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
