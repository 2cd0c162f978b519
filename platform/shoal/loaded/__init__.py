"""Registered models as objects of this process: `shoal.load`."""

from shoal.loaded.model import LocalModel, load

__all__ = ["LocalModel", "load"]
