"""``sametoken chat`` at a terminal: a real process behind a pseudo-terminal, with the hybrid."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from sametoken.models.names import HYBRID_NAME

PATIENCE_S = 600
PROMPT = "\n> "
GREEN = "\x1b[1;32m"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
QUESTION = "Write a function that adds two numbers."
INTERRUPT, END = "\x03", "\x04"


def heed_ctrl_c(terminal: int) -> None:
    """Make the terminal the process's controlling one: Ctrl-C is a signal in no other case.

    A process that is started in the background ignores that signal, as do its children.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


class Terminal:
    """A process that has a pseudo-terminal as its controlling one."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 500, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sametoken", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: heed_ctrl_c(theirs),  # noqa: PLW1509
            env=os.environ | {"TERM": "xterm"},
        )
        os.close(theirs)
        self._unread = ""

    def send(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, text: str) -> str:
        """What is shown up to this text, escape codes included."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in ESCAPE.sub("", self._unread):
            assert select.select([self._ours], [], [], deadline - time.monotonic())[0], self._unread
            self._unread += os.read(self._ours, 4096).decode(errors="replace").replace("\r", "")
        shown, self._unread = self._unread, ""
        return shown

    def interrupt_until(self, text: str) -> str:
        """What is shown up to the prompt after a text, for which Ctrl-C is pressed again and again.

        A signal between a prompt and readline's wait is noticed at the next key or signal only.
        """
        deadline = time.monotonic() + PATIENCE_S
        while text not in self._unread:
            assert time.monotonic() < deadline, self._unread
            self.send(INTERRUPT)
            while select.select([self._ours], [], [], 2)[0] and text not in self._unread:
                self._unread += os.read(self._ours, 4096).decode(errors="replace")
        return self.until(PROMPT)

    def ask(self, line: str) -> str:
        """What is shown after a line, up to the next prompt."""
        self.send(line + "\n")
        return self.until(PROMPT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal():
    started = Terminal(
        *("chat", HYBRID_NAME, "--temperature", "0", "--max-tokens", "160"),
        *("--speculative-config", "off"),
    )
    yield started
    started.close()


def answer_in(shown: str) -> tuple[str, str]:
    """The answer, and the line of figures below it."""
    _, *lines = ESCAPE.sub("", shown).removesuffix(PROMPT).splitlines()
    return "\n".join(lines[:-1]), lines[-1]


def test_a_chat(terminal, tmp_path):
    greeting = terminal.until(PROMPT)
    assert f"You chat with {HYBRID_NAME}." in greeting
    assert f"{GREEN}Green" in greeting

    terminal.send(QUESTION + "\n")
    terminal.until("def ")
    terminal.send(INTERRUPT)
    assert "tokens, stopped]" in ESCAPE.sub("", terminal.until(PROMPT))

    shown = terminal.ask("/again")
    plain, figures = answer_in(shown)
    assert GREEN not in shown
    assert re.fullmatch(r"\[160 tokens, [\d.]+ tokens/s, cut by --max-tokens\]", figures)

    assert "Drafts: mtp, up to 3 per step; the model was" in terminal.ask("/drafts mtp")
    shown = terminal.ask("/again")
    assert GREEN in shown
    drafted, figures = answer_in(shown)
    assert drafted == plain
    assert re.search(r"160 tokens, [\d.]+ tokens/s, [\d.]+ accepted drafts per step", figures)

    assert "/drafts [off|ngram|suffix|mtp|JSON] changes them" in terminal.ask("/drafts")
    assert "Did you mean '/drafts'?" in terminal.ask("/draft")
    assert "'ngrm' is not known. Did you mean 'ngram'?" in terminal.ask("/drafts ngrm")
    path = tmp_path / "chat.json"
    terminal.ask(f"/save {path}")
    saved = json.loads(Path(path).read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]
    assert saved["messages"][1]["content"].splitlines() == plain.splitlines()

    terminal.interrupt_until("Ctrl-D or /quit leaves")
    terminal.send(END)
    assert terminal.process.wait(PATIENCE_S) == 0


def test_the_command_alone_offers_a_chat():
    alone = Terminal()
    try:
        assert "Start a chat with smollm2? [Y/n]" in ESCAPE.sub("", alone.until("[Y/n]"))
        alone.send("n\n")
        assert "Run a model" in alone.until("lists the keys of --speculative-config")
        assert alone.process.wait(PATIENCE_S) == 0
    finally:
        alone.close()
