"""The FastAPI application: endpoints, their documentation, and middleware."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import sametoken
from sametoken.errors import RequestError
from sametoken.serving.http.adapters import adapter_routes
from sametoken.serving.http.body import JsonRoute
from sametoken.serving.http.chat import answer_chat
from sametoken.serving.http.completions import complete
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.errors import MESSAGES_PATH, as_api_error, install_handlers, invalid
from sametoken.serving.http.messages_api.answer import answer_message, count_tokens
from sametoken.serving.http.messages_api.objects import MessageObject, MessagesError, TokenCount
from sametoken.serving.http.messages_api.request import CountTokensRequest, MessagesRequest
from sametoken.serving.http.metrics import make_registry
from sametoken.serving.http.middleware import (
    Authentication,
    BodyBounds,
    BodyLimit,
    HeadAsGet,
    RateLimit,
)
from sametoken.serving.http.pages import ASSETS, page_assets, page_routes
from sametoken.serving.http.params import named_as_sent
from sametoken.serving.http.response_schemas import (
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    ErrorResponse,
    Health,
    ModelCard,
    ModelList,
    TokenizeResponse,
    Version,
    json_response,
)
from sametoken.serving.http.responses_api.answer import answer_response, count_input
from sametoken.serving.http.responses_api.objects import InputTokens, ResponseObject
from sametoken.serving.http.responses_api.request import ResponsesRequest
from sametoken.serving.http.rollouts import rollout_routes
from sametoken.serving.http.schemas import (
    TEMPLATE_WRITES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sametoken.serving.http.served import Served
from sametoken.serving.http.times import RequestTimes
from sametoken.serving.http.tools import template_tools
from sametoken.serving.stats import AuditStats

if TYPE_CHECKING:
    from sametoken.serving.async_llm import AsyncLLM

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request must be changed"},
    401: {"model": ErrorResponse, "description": "The API key is missing or wrong"},
    404: {"model": ErrorResponse, "description": "There is no such model"},
    408: {"model": ErrorResponse, "description": "The request came too slowly"},
    413: {"model": ErrorResponse, "description": "The request is too large"},
    415: {"model": ErrorResponse, "description": "The body is compressed"},
    429: {"model": ErrorResponse, "description": "Too many requests; see Retry-After"},
    500: {"model": ErrorResponse, "description": "The model or the server failed"},
    503: {"model": ErrorResponse, "description": "Requests are not accepted now"},
}
#: Of each event, not of the whole stream, as FastAPI documents streams of its own.
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}}
}
_UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    503: {"model": Health, "description": "Requests are not accepted now"}
}


def create_app(engine: AsyncLLM, config: ServerConfig) -> FastAPI:
    """The application over an engine that is ready."""
    model = config.names(engine.resolved.model)[0]
    registry = make_registry(engine.stats, engine.resolved, model)
    served = Served(engine, config, RequestTimes(registry, model), engine.server_defaults())
    app = FastAPI(
        title="sametoken",
        version=sametoken.__version__,
        separate_input_output_schemas=False,
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(_openai_routes(served))
    app.include_router(_messages_routes(served))
    app.include_router(_token_routes(served))
    app.include_router(_status_routes(served, registry))
    app.include_router(page_routes())
    app.mount(ASSETS, page_assets())
    transfer = config.weight_transfer
    if transfer is not None:
        app.include_router(rollout_routes(served, transfer))
    if config.allow_runtime_lora_updating:
        app.include_router(adapter_routes(served))
    install_handlers(app)
    _document(app)
    # The middleware added last runs first.
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyLimit, bounds=BodyBounds.of(config))
    if config.rate_limit:
        app.add_middleware(RateLimit, per_minute=config.rate_limit, by_key=bool(config.api_key))
    app.add_middleware(Authentication, api_keys=config.api_key)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def _openai_routes(served: Served) -> APIRouter:
    router = APIRouter(prefix="/v1", responses=_ERRORS, route_class=JsonRoute)

    @router.post("/completions", response_model=CompletionResponse, responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        with named_as_sent(body):
            return await complete(served, body, request)

    @router.post("/chat/completions", response_model=ChatResponse, responses=_STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        with named_as_sent(body):
            return await answer_chat(served, body, request)

    @router.post("/responses", response_model=ResponseObject, responses=_STREAMED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation of items. Nothing is stored."""
        return await answer_response(served, body, request)

    @router.post("/responses/input_tokens")
    async def count(body: ResponsesRequest) -> InputTokens:
        """The number of tokens of a conversation of items."""
        return await count_input(served, body)

    @router.get("/models")
    # Other paths lead from one to the other by themselves. Here it would be a model without a name.
    @router.get("/models/", include_in_schema=False)
    async def models() -> ModelList:
        """The model under each of its names, and its adapters."""
        return ModelList(data=served.cards())

    @router.get("/models/{model:path}")
    async def one_model(model: str) -> ModelCard:
        """The model under one of its names, or an adapter."""
        name = served.name(model)
        return next(card for card in served.cards() if card.id == name)

    return router


def _messages_routes(served: Served) -> APIRouter:
    errors = {status: {**said, "model": MessagesError} for status, said in _ERRORS.items()}
    router = APIRouter(prefix=MESSAGES_PATH, responses=errors, route_class=JsonRoute)

    @router.post("", response_model=MessageObject, responses=_STREAMED)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation in Anthropic's format."""
        return await answer_message(served, body, request)

    @router.post("/count_tokens")
    async def count(body: CountTokensRequest) -> TokenCount:
        """The number of tokens of a conversation in Anthropic's format."""
        return await count_tokens(served, body)

    return router


def _token_routes(served: Served) -> APIRouter:
    router = APIRouter(responses=_ERRORS, route_class=JsonRoute)

    @router.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text or a conversation."""
        served.name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("send exactly one of prompt and messages", "prompt")
        if body.messages is not None:
            if "add_special_tokens" in body.model_fields_set and body.add_special_tokens:
                raise invalid(
                    f"add_special_tokens is not supported with messages: {TEMPLATE_WRITES}",
                    "add_special_tokens",
                )
            prompt = await served.render(
                body.messages,
                body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                tools=template_tools(body.tools) if body.tools else None,
            )
        else:
            prompt = await served.tokenize(
                body.prompt or "", add_special_tokens=body.add_special_tokens
            )

        def answer() -> Response:
            whole = TokenizeResponse(
                count=len(prompt.token_ids),
                max_model_len=served.engine.resolved.max_model_len,
                tokens=list(prompt.token_ids),
            )
            if body.return_token_strs:
                decode = served.engine.get_tokenizer().decode_token
                whole.token_strs = [decode(token_id) for token_id in prompt.token_ids]
            return json_response(whole)

        return await asyncio.to_thread(answer)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """The text of token ids."""
        served.name(body.model)
        vocab_size = served.engine.resolved.vocab_size
        if max(body.tokens, default=0) >= vocab_size:
            raise RequestError(
                f"tokens hold an id outside the vocabulary of {vocab_size}",
                f"use ids from 0 to {vocab_size - 1}",
                param="tokens",
            )
        decode = served.engine.get_tokenizer().decode
        text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)
        return DetokenizeResponse(prompt=text)

    return router


def _status_routes(served: Served, registry: CollectorRegistry) -> APIRouter:
    router = APIRouter()
    engine = served.engine

    @router.get("/health", response_model=Health, responses=_UNAVAILABLE)
    async def health() -> Response:
        """Whether the engine runs, and the shadow audit's results. 503 if it does not run."""
        detail: dict[str, Any] = {"shadow_audit": _audit_detail(engine.stats().audit)}
        if engine.errored is not None:
            # Only the code: this path needs no key, and errors may name files.
            detail["cause"] = as_api_error(engine.errored).code
        body = Health(status=_status(engine), detail=detail).model_dump()
        return JSONResponse(body, status_code=200 if engine.errored is None else 503)

    @router.get("/ready", response_model=Health, responses=_UNAVAILABLE)
    async def ready() -> Response:
        """Whether requests are accepted. 503 while they are not."""
        body = Health(status=_status(engine), detail={}).model_dump()
        return JSONResponse(body, status_code=200 if engine.is_ready else 503)

    @router.get("/version")
    async def version() -> Version:
        """The version of the server."""
        return Version(version=sametoken.__version__)

    @router.get("/metrics", response_class=Response, responses={200: {"content": _METRICS}})
    async def metrics() -> Response:
        """Counters in Prometheus' text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _status(engine: AsyncLLM) -> Literal["ok", "draining", "down"]:
    if engine.errored is not None:
        return "down"
    return "ok" if engine.is_ready else "draining"


_METRICS = {"text/plain": {"schema": {"type": "string"}}}


def _audit_detail(audit: AuditStats) -> dict[str, Any]:
    difference = audit.last_difference
    return {
        "audited": audit.num_audited,
        "differences": audit.num_mismatched,
        "pending": audit.num_pending,
        "dropped": audit.num_dropped,
        "last_difference": None if difference is None else asdict(difference),
    }


def _document(app: FastAPI) -> None:
    """Remove status 422 from the OpenAPI document: no response has it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                document["components"]["schemas"].pop(name, None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
