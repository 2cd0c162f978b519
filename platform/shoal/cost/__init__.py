"""What a run costs: parameters, arithmetic, memory, communication, time. Told before, and measured during a run.

Who predicts imports `shoal.cost.prediction`, who measures `shoal.cost.probe`: they load parts of torch that take
a second of the start of everybody who only reads what they found.
"""

from shoal.cost.table import COMPARED, MEASURED, PREDICTED, QUANTITIES, CostTable

__all__ = ["COMPARED", "MEASURED", "PREDICTED", "QUANTITIES", "CostTable"]
