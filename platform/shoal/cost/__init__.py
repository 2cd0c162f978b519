"""What a run costs: parameters, arithmetic, memory, communication, time. Told before, and measured during a run."""

from shoal.cost.prediction import predict
from shoal.cost.probe import CostProbe
from shoal.cost.table import COMPARED, MEASURED, PREDICTED, QUANTITIES, CostTable

__all__ = ["COMPARED", "MEASURED", "PREDICTED", "QUANTITIES", "CostProbe", "CostTable", "predict"]
