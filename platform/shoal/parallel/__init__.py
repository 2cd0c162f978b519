"""What the processes of a group do to one model: replicate it, shard it, split its layers, or cut it into stages."""

from shoal.parallel.plan import Coordinates, Degrees, ParallelSpec
from shoal.parallel.world import World

__all__ = ["Coordinates", "Degrees", "ParallelSpec", "World"]
