"""Populations: many members of one architecture trained at once on one device, and how they learn from each other.

Nothing here imports Ray. Names that need torch are imported at their first use.
"""

from typing import TYPE_CHECKING

from shoal.extend import load_on_demand
from shoal.plugins.library import Library

if TYPE_CHECKING:
    from shoal.libs.population.population import Population as Population

LIBRARY = Library(
    "population",
    displays={"population": "shoal.libs.population.display"},
    extensions={"shoal.panels": {"population": "shoal.libs.population.report:PANELS"}},
)

__getattr__ = load_on_demand(__name__)
