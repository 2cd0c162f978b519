"""Rigs for the tests of Tasks, models and endpoints: what a user would run on a cluster, in the process of the test.

Imported by tests alone, a user's or Shoal's; see docs/testing.md.
"""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.testing.endpoint import Endpoint
    from shoal.testing.loop import Loop
    from shoal.testing.run import MemoryLog, TaskRun, train

__all__ = ["Endpoint", "Loop", "MemoryLog", "TaskRun", "train"]

__getattr__ = load_on_demand(__name__)
