"""What the processes of a group do to one model: replicate it, shard it, split its layers, or cut it into stages."""

from shoal.parallel.comm.world import World
from shoal.parallel.model import Learnable, ParallelModel
from shoal.parallel.spec import Coordinates, Degrees, ParallelSpec
from shoal.parallel.validate import check_plan

__all__ = [
    "Coordinates",
    "Degrees",
    "Learnable",
    "ParallelModel",
    "ParallelSpec",
    "World",
    "check_plan",
]
