"""Populations: many members of one architecture trained at once on one device, and how they learn from each other.

Nothing here imports Ray. Names that need torch are imported at their first use.
"""

from typing import TYPE_CHECKING

from shoal.extend import load_on_demand

if TYPE_CHECKING:
    from shoal.libs.population.population import Population as Population

__getattr__ = load_on_demand(__name__)
