"""``sametoken.bench.sweep_engine``, but it measures memory's speed with little of it."""

from __future__ import annotations

import sys

from sametoken.bench import roofline, sweep_engine

if __name__ == "__main__":
    roofline.CPU_BYTES = 1 << 22
    sys.exit(sweep_engine.main())
