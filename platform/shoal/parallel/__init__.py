"""How the processes of a group share one model: replicate it, shard it, split its layers, or split it into stages."""

from shoal.errors import needs_extra

with needs_extra("cluster"):
    from shoal.parallel.comm.world import World
    from shoal.parallel.model import ParallelModel, TaskProtocol
    from shoal.parallel.spec import Coordinates, ParallelDims, ParallelSpec
    from shoal.parallel.validate import check_plan

__all__ = ["Coordinates", "ParallelDims", "ParallelModel", "ParallelSpec", "TaskProtocol", "World", "check_plan"]
