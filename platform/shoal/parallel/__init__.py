"""What the processes of a group do to one model: replicate it, shard it, split its layers, or cut it into stages."""

from shoal.parallel.checks import check_plan
from shoal.parallel.model import Learnable, ParallelModel, parallelize
from shoal.parallel.plan import Coordinates, Degrees, ParallelSpec
from shoal.parallel.world import World

__all__ = [
    "Coordinates",
    "Degrees",
    "Learnable",
    "ParallelModel",
    "ParallelSpec",
    "World",
    "check_plan",
    "parallelize",
]
