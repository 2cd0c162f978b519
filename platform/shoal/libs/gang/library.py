"""What this library adds to specs of endpoints."""

from shoal.plugins.library import Library

_START = "shoal.libs.gang.ray_workers:start_gang"
LIBRARY = Library("gang", extensions={"shoal.predictors": {"pipeline": _START, "tensor": _START}})
