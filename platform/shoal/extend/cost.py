"""Costs, for libraries: counts of operations, memory and time."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.cost.cost_table import (
        MEASURED,
        PLACEMENT_HEADINGS,
        PREDICTED,
        QUANTITIES,
        CostTable,
        PlacementRow,
        build_cost_panel,
        combine_ranks,
        format_quantity,
        relative_error,
    )
    from shoal.cost.fake_tensors import FakeMode, ModelTooLarge, build_small_model, use_fake_tensors
    from shoal.cost.measure.collective_bytes import assume_cuda
    from shoal.cost.measure.memory import bytes_of, measure_growth, state_of, to_local
    from shoal.cost.measure.op_counter import OpCounts, count_ops
    from shoal.cost.step_profiler import measure_peak_flops, profile_step

__getattr__ = load_on_demand(__name__)
