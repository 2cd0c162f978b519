"""The cost of a run: parameters, arithmetic, memory, communication, time.

`step_profiler` measures it during a run; an estimator, which a library brings, predicts it. Both load parts of torch
that take a second, so a process that only reads results imports neither.
"""

from shoal.cost.cost_table import COMPARED, MEASURED, PREDICTED, QUANTITIES, CostTable

__all__ = ["COMPARED", "MEASURED", "PREDICTED", "QUANTITIES", "CostTable"]
