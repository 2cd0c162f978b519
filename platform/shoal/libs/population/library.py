"""The display of this library's runs, and what the report shows of them."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "population",
    displays={"population": "shoal.libs.population.display"},
    extensions={"shoal.panels": {"population": "shoal.libs.population.report:PANELS"}},
)
