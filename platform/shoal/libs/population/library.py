"""The display of this library's runs."""

from shoal.plugins.library import Library

LIBRARY = Library("population", displays={"population": "shoal.libs.population.display"})
