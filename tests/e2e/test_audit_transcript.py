"""The audit against transcripts in vLLM's form: what its servers answered, played back.

Both servers answer the same four prompts, twice each. Plainly, one answer differs from itself at
a near tie. With speculation one answer differs at a near tie, one repeats a fragment.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sametoken.audit.asks import AuditRequest
from sametoken.audit.compare import CORRUPTION, REPEATED, TIE
from sametoken.audit.server_audit import audit_sides, server_side
from sametoken.audit.servers import Server
from sametoken.audit.verdict import CORRUPTED, NONDETERMINISTIC

WORDS = [f" w{i}" for i in range(40)]
ASKS = [AuditRequest(name, (), name, 0.0, 0, 40) for name in ("a", "b", "c", "d")]
#: Log-probability of the best token over the second, where nothing is close.
CLEAR = 2.0
CLOSE = 0.01


def completion(words: list[str], close_at: int | None = None, nudge: float = 0.0) -> dict:
    """A body of vLLM's ``/v1/completions`` with two log-probabilities a token."""
    top = []
    for place, word in enumerate(words):
        margin = CLOSE if place == close_at else CLEAR
        top.append({word: -0.1 + nudge, f"{word}?": -0.1 - margin - nudge})
    return {
        "id": "cmpl-0f",
        "object": "text_completion",
        "created": 1,
        "model": "served",
        "choices": [
            {
                "index": 0,
                "text": "".join(words),
                "logprobs": {
                    "text_offset": list(range(len(words))),
                    "token_logprobs": [max(one.values()) for one in top],
                    "tokens": words,
                    "top_logprobs": top,
                },
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
                "prompt_token_ids": None,
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 41},
    }


def at_the_tie() -> list[str]:
    """Another word at token 7, the close one, and another text from there on."""
    return [*WORDS[:7], " w7?", *(f" v{i}" for i in range(32))]


def looping() -> list[str]:
    """A fragment again and again from token 12 on, where no tie was."""
    return [*WORDS[:12], *([" the", " same", " words"] * 10)[:28]]


PLAIN = {
    "a": [completion(WORDS)],
    "b": [completion(WORDS, close_at=7)],
    "c": [completion(WORDS)],
    "d": [completion(WORDS, close_at=7), completion(at_the_tie(), close_at=7, nudge=0.004)],
}
SPECULATIVE = PLAIN | {
    "b": [completion(at_the_tie(), close_at=7, nudge=0.004)],
    "c": [completion(looping())],
}
LABELS = 'engine="0",model_name="served"'


def metrics(count: int) -> str:
    """vLLM's counters after a number of steps with one draft each, half of them accepted."""
    values = {
        f"num_drafts_total{{{LABELS}}}": count,
        f"num_draft_tokens_total{{{LABELS}}}": count,
        f"num_accepted_tokens_total{{{LABELS}}}": count // 2,
        f'num_accepted_tokens_per_pos_total{{{LABELS},position="0"}}': count // 2,
    }
    return "".join(f"vllm:spec_decode_{name} {value}.0\n" for name, value in values.items())


class Playback(BaseHTTPRequestHandler):
    """Answers each prompt with its transcript's next body; the last one stays."""

    transcript: dict[str, list[dict]]
    asked: defaultdict[str, int]

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(metrics(20 * sum(self.asked.values())), "text/plain")
        else:
            self._send(json.dumps({"data": [{"id": "served"}]}), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (body["model"], body["logprobs"]) == ("served", 2)
        bodies = self.transcript[body["prompt"]]
        turn = self.asked[body["prompt"]]
        self.asked[body["prompt"]] += 1
        self._send(json.dumps(bodies[min(turn, len(bodies) - 1)]), "application/json")

    def _send(self, text: str, kind: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def play():
    servers = []

    def start(transcript) -> str:
        members = {"transcript": transcript, "asked": defaultdict(int)}
        handler = type("Handler", (Playback,), members)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def audit(subject: str, baseline: str):
    return audit_sides(server_side(Server(subject), 4), server_side(Server(baseline), 4), ASKS)


def test_corruption_is_told_from_a_tie(play):
    verdict = audit(play(SPECULATIVE), play(PLAIN))
    assert verdict.summary == CORRUPTED
    kinds = {d.request: d.kind for d in verdict.comparisons[0].divergences}
    assert kinds == {"b": TIE, "c": CORRUPTION}
    places = {d.request: d.position for d in verdict.comparisons[0].divergences}
    assert places == {"b": 7, "c": 12}
    assert [(d.request, d.kind) for d in verdict.defects] == [("c", REPEATED)]
    assert [d.request for d in verdict.repeats[0].divergences] == ["d"]


def test_a_server_that_differs_from_itself_alone_is_not_corrupt(play):
    verdict = audit(play(PLAIN | {"b": SPECULATIVE["b"]}), play(PLAIN))
    assert verdict.summary == NONDETERMINISTIC
    assert verdict.noise == pytest.approx(4 * 0.014)


def test_acceptance_is_read_from_the_server_s_counters(play):
    verdict = audit(play(SPECULATIVE), play(PLAIN))
    profile = verdict.diagnosis.profiles["running"]
    assert (profile.judged, profile.accepted) == ((160,), (80,))
