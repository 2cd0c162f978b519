"""Rigs for the tests of Tasks, models and endpoints: what a user would run on a cluster, in the process of the test.

Imported by tests alone, a user's or Shoal's; see docs/testing.md.
"""

from shoal.testing.endpoint import Endpoint

__all__ = ["Endpoint"]
