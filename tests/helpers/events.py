"""Event streams of the server, read and put together."""

from __future__ import annotations

import json


def events(answer) -> list[dict]:
    """The objects of an event stream that ends as it should."""
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def named_events(answer) -> list[dict]:
    """The objects of an event stream, each named by its type."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for lines in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = lines.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def merged_completions(chunks: list[dict]) -> dict[int, dict]:
    """Choices of a completion stream, by index."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            empty = {"text": "", "token_ids": [], "logprobs": {}, "finish_reason": None}
            whole = choices.setdefault(choice["index"], empty)
            whole["text"] += choice["text"]
            whole["token_ids"] += choice.get("token_ids") or []
            whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
            for key, values in (choice["logprobs"] or {}).items():
                whole["logprobs"].setdefault(key, []).extend(values)
    return choices


def merged_chat(chunks: list[dict]) -> dict[int, dict]:
    """Messages of a chat stream, by index, in the form of the answer without a stream."""
    choices: dict[int, dict] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        empty = {"logprobs": [], "token_ids": [], "finish_reason": None}
        texts = {"content": "", "reasoning": "", "tool_calls": []}
        whole = choices.setdefault(choice["index"], empty | texts)
        delta = choice["delta"]
        whole["reasoning"] += delta.get("reasoning") or ""
        whole["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(whole["tool_calls"]):
                function = {"name": call["function"]["name"], "arguments": ""}
                whole["tool_calls"].append({"id": call["id"], "function": function})
            function = whole["tool_calls"][call["index"]]["function"]
            function["arguments"] += call["function"]["arguments"]
        whole["logprobs"] += (choice["logprobs"] or {}).get("content", [])
        whole["token_ids"] += choice.get("token_ids") or []
        whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
    return choices
