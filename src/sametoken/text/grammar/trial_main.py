"""A process that tries grammars: it may take too long or too much memory, and is killed then.

Run as ``python -m sametoken.text.grammar.trial_main FD``, the number of an inherited socket.
The first message is a ``Vocabulary``, every further one a ``GrammarSource``; each is answered
with None or with an error. It ends when the socket closes.
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
from sametoken.text.grammar.compiled import (
    CompiledGrammars,
    GrammarSource,
    Vocabulary,
)
from sametoken.text.grammar.grammar import XGrammar

#: Below the engine and the serving process, whose requests are under way.
_NICENESS = 5
#: Bytes that a trial may take beyond what the libraries take.
MAX_MEMORY = 2**30
_NOTHING_KEPT = CompiledGrammars(max_kept_bytes=0)
#: Seconds after which a trial that nobody has ended ends itself: its parent died meanwhile.
_ORPHAN_S = 30


def serve(connection: Connection) -> None:
    """Answer until nobody asks any more."""
    vocabulary: Vocabulary = connection.recv()
    vocabulary.compiler  # noqa: B018  # the libraries are imported here
    _limit_memory()
    _silence()
    connection.send(None)
    while True:
        source: GrammarSource = connection.recv()
        signal.alarm(_ORPHAN_S)
        refusal = tried(source, vocabulary)
        signal.alarm(0)
        connection.send(refusal)


def tried(source: GrammarSource, vocabulary: Vocabulary) -> SametokenError | None:
    """Why a grammar is not sound; None if it is."""
    try:
        XGrammar(source, vocabulary, _NOTHING_KEPT).require_sound()
    except SametokenError as error:
        return error
    except MemoryError:
        return RequestError(
            f"structured_outputs {source.kind} takes too much memory to compile", "make it smaller"
        )
    return None


def _limit_memory() -> None:
    sizes = Path("/proc/self/statm")
    # Only Linux says how much the libraries have mapped, and keeps to such a limit.
    if sizes.exists():
        mapped = int(sizes.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MAX_MEMORY,) * 2)


def _silence() -> None:
    """What libraries say of a client's grammar is no text for the server's log."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stderr.fileno())


def main(fd: int) -> int:
    """Serve over the inherited socket."""
    # As in the engine process: what a stop means is decided by the serving process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    with contextlib.suppress(EOFError, OSError):
        serve(Connection(fd))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
