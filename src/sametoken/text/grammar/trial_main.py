"""A process that validates grammars, with a memory limit.

Run as ``python -m sametoken.text.grammar.trial_main FD``, the number of an inherited socket.
The first message is a ``TokenizerText`` or a ``Vocabulary``, answered with the vocabulary, or with
an error and the process's end. Every further one is a ``GrammarSource``, answered with None or an
error. The process ends when the socket closes; its parent kills it if it is slow.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from sametoken.errors import RequestError, SametokenError
from sametoken.io.child_process import ignore_signals
from sametoken.text.grammar.compiled import (
    CompiledGrammars,
    GrammarSource,
    TokenizerText,
    Vocabulary,
)
from sametoken.text.grammar.grammar import XGrammar

#: Lower priority than the engine and the serving process.
_NICENESS = 5
#: Bytes that a trial may take beyond those of the imported libraries.
MAX_MEMORY = 2**30
_NO_CACHE = CompiledGrammars(max_kept_bytes=0)
#: Seconds after which a trial ends itself: its parent, which enforces the time limit, is gone.
_ORPHAN_S = 30


def serve(connection: Connection) -> None:
    """Answer requests until the socket closes."""
    tokens: TokenizerText | Vocabulary = connection.recv()
    try:
        vocabulary = tokens.pack() if isinstance(tokens, TokenizerText) else tokens
    except RequestError as refusal:
        connection.send(refusal)
        return
    vocabulary.compiler  # noqa: B018  # imports the libraries
    _limit_memory()
    _silence()
    connection.send(vocabulary)
    while True:
        source: GrammarSource = connection.recv()
        signal.alarm(_ORPHAN_S)
        error = validate(source, vocabulary)
        signal.alarm(0)
        connection.send(error)


def validate(source: GrammarSource, vocabulary: Vocabulary) -> SametokenError | None:
    """The error in a grammar; None if it is valid."""
    try:
        XGrammar(source, vocabulary, _NO_CACHE).validate()
    except SametokenError as error:
        return error
    except MemoryError:
        return RequestError(
            f"structured_outputs {source.kind} takes too much memory to compile", "make it smaller"
        )
    return None


def _limit_memory() -> None:
    sizes = Path("/proc/self/statm")
    # Only Linux reports the mapped bytes and enforces RLIMIT_AS.
    if sizes.exists():
        mapped = int(sizes.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MAX_MEMORY,) * 2)


def _silence() -> None:
    """Keep the libraries' messages about clients' grammars out of the server's log."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stderr.fileno())


def main(fd: int) -> int:
    """Serve over the inherited socket."""
    ignore_signals()
    os.nice(_NICENESS)
    with contextlib.suppress(EOFError, OSError):
        serve(Connection(fd))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
