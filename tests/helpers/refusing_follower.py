"""A follower that says why it cannot, and ends: ``python -m helpers.refusing_follower FD ...``."""

from __future__ import annotations

import socket
import sys

from sametoken.errors import UnsupportedError
from sametoken.io.child_process import Failure, encode

if __name__ == "__main__":
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.sendall(encode(Failure(UnsupportedError("rank 1 is not on this machine", "buy one"))))
