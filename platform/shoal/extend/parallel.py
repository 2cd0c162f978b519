"""Plans, for libraries: plans, their partitions and models."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.parallel import ParallelDims, ParallelSpec, World
    from shoal.parallel.build import parallelize
    from shoal.parallel.comm.shm_all_reduce import ShmAllReduce
    from shoal.parallel.comm.shm_p2p import ShmP2P
    from shoal.parallel.comm.world import TIMEOUT_S, choose_device, read_clock_s, set_network_interface
    from shoal.parallel.deferred.build import pause_recording
    from shoal.parallel.loss import Loss, Mean, get_value, split_mean
    from shoal.parallel.model import ParallelModel, TaskProtocol, compute_loss_and_metrics
    from shoal.parallel.pipeline.model import PipelineModel
    from shoal.parallel.pipeline.partition import StagePartition, find_partition
    from shoal.parallel.pipeline.schedules import SCHEDULE_CLASSES, SINGLE_STAGE, check_schedule, get_stage_ranks
    from shoal.parallel.pipeline.stage_forward import StageForward, build_stage_slices
    from shoal.parallel.spec import ScheduleName
    from shoal.parallel.spmd import fsdp_layout
    from shoal.parallel.spmd.base import SingleProcessModel
    from shoal.parallel.state.module_snapshot import eval_mode, freeze_parameters
    from shoal.parallel.state.skeleton import build_skeleton, expand_constant, set_parameters
    from shoal.parallel.task_step import get_train_step, sum_losses
    from shoal.parallel.tensor import apply, plan
    from shoal.parallel.tensor.apply import split_layers
    from shoal.parallel.tensor.plan import TensorPlan, find_tensor_plan
    from shoal.parallel.validate import check_plan

__getattr__ = load_on_demand(__name__)
