"""The number of usable processors: in a container, or under `taskset`, fewer than the machine's.

Called by code that chooses a number of threads, and by `shoal doctor`. Standard library only.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")


def count_usable_cores(control_group: Path = CONTROL_GROUP) -> int:
    """The CPUs in this process's affinity mask, limited by its control group's quota; at least 1."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(bound, _read_cpu_quota(control_group))))


def _read_cpu_quota(control_group: Path) -> float:
    """CPU seconds per second, from the files of control groups, version 2, else 1."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        files = [control_group / name for name in names]
        if all(file.exists() for file in files):
            quota, period = " ".join(file.read_text() for file in files).split()
            return int(quota) / int(period) if quota.isdecimal() else math.inf  # "max", or -1
    return math.inf
