"""The entry point of the command, and of ``python -m sametoken``."""

from __future__ import annotations

import os
import signal
import sys

from sametoken.cli import INTERRUPTED


def main() -> None:
    """Run the command line; an interrupt while its modules are loaded leaves no traceback."""
    if os.getpid() == 1:
        # Of a container: the system drops signals that this process does not handle.
        signal.signal(signal.SIGTERM, lambda *received: sys.exit(128 + signal.SIGTERM))
    try:
        from sametoken.cli import main as command
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    command.main()


if __name__ == "__main__":
    main()
