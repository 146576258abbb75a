"""The OpenAPI document is true: what fits it, and what does not, is answered as it says."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from helpers.chat_model import write_chat_model
from helpers.http_server import running_server
from sametoken.serving.http.config import ServerConfig

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


OPERATIONS = {
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "GET /ready",
    "GET /version",
    "GET /metrics",
    "GET /",
}
FIELDS = {"prompt", "messages", "input", "n", "stream", "echo", "logprobs", "stop", "seed", "top_p"}
MAX_BODY = ServerConfig().max_request_bytes
#: No model has a name that is drawn.
NEVER_RIGHT = {"GET /v1/models/{model}"}


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    model = write_chat_model(tmp_path_factory.mktemp("served") / "model")
    with running_server(model, served_model_name=("tiny",), max_completions=4) as server:
        document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        found = [one.ok() for one in document.get_all_operations()]
        yield {operation.label: operation for operation in found}


def test_every_endpoint_is_documented(operations):
    assert set(operations) == OPERATIONS


def draw(operation, mode: GenerationMode, check) -> None:
    """Call ``check`` with cases of an operation."""

    @seed(0)
    @settings(
        max_examples=8,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def each(case):
        check(case)

    each()


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_answers_are_as_documented(operations, label):
    statuses = []

    def check(case):
        if label.startswith("POST /v1/"):
            # What is drawn is seldom a model's name or a known field, and fields seldom go well
            # together: every other body has the asked text alone. These reach the engine.
            fields = FIELDS if len(statuses) % 2 else {"prompt", "messages", "input"}
            body = {name: case.body[name] for name in case.body if name in fields}
            if fields != FIELDS and isinstance(body.get("input"), list):
                # Items that are drawn lack what their types need.
                body["input"] = "x"
            limit = "max_output_tokens" if "/responses" in label else "max_tokens"
            case.body = body | {"model": "tiny", limit: 2}
            if fields != FIELDS and len(statuses) % 4:
                case.body["stream"] = True
        elif label == "POST /tokenize" and len(statuses) % 2:
            # One of two optional fields has to be there.
            case.body = {"prompt": "x"}
        statuses.append(case.call_and_validate(checks=CHECKS).status_code)

    draw(operations[label], GenerationMode.POSITIVE, check)
    assert label in NEVER_RIGHT or 200 in statuses


@pytest.mark.parametrize("label", sorted(one for one in OPERATIONS if one.startswith("POST")))
def test_wrong_bodies_are_refused_as_documented(operations, label):
    def check(case):
        response = case.call()
        # A list with too many items may be too long to be read at all.
        if len(response.request.body or "") > MAX_BODY:
            assert response.status_code == 413
            return
        case.validate_response(response, checks=CHECKS)
        assert response.status_code == 400

    draw(operations[label], GenerationMode.NEGATIVE, check)
