"""The entry point of ``python -m sametoken``."""

from sametoken.cli.main import main

main()
