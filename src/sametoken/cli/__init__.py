"""The command line."""

#: Exit status of an interrupted command: 128 and the number of SIGINT, as in shells.
INTERRUPTED = 130
