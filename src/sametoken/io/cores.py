"""The cores that this process may use, and whether threads that wait take them from others."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

#: How long an idle OpenMP thread spins before it sleeps. The default is very slow on shared cores
#: (docs/decisions/0005), and stays if torch was loaded before sametoken set the variable.
SPIN_COUNT = "3000"
SPINS_BRIEFLY = "torch" not in sys.modules or "GOMP_SPINCOUNT" in os.environ

#: Where Linux says how many microseconds of cores a period may take, and how long it is: in one
#: file of version 2 of control groups, in two of version 1.
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def num_usable_cores(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that the process may run on, or fewer if a container's quota allows no more.

    Threads beyond a quota (``docker run --cpus``) use it up early, and all wait for its next
    period.

    Args:
        control_group: the folder of the process's control group.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return math.ceil(min(cores or 1, _quota(control_group)))


def _quota(control_group: Path) -> float:
    """Cores of the quota; infinite without one."""
    for names in _QUOTAS:
        try:
            words = " ".join((control_group / name).read_text() for name in names).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):
            # "max" is no number.
            continue
        if quota > 0 and period > 0:
            return quota / period
    return math.inf
