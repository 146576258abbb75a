"""The entry point of the command, and of ``python -m sametoken``."""

from __future__ import annotations

import sys

from sametoken.cli import INTERRUPTED


def main() -> None:
    """Run the command line; an interrupt while its modules are loaded leaves no traceback."""
    try:
        from sametoken.cli import main as command
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    command.main()


if __name__ == "__main__":
    main()
