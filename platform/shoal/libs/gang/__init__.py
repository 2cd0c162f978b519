"""A replica that is several workers: its models are split between them, each of which has a part of the weights."""

from shoal.plugins.library import Library

_START = "shoal.libs.gang.ray_workers:start_gang"
LIBRARY = Library("gang", extensions={"shoal.predictors": {"pipeline": _START, "tensor": _START}})
