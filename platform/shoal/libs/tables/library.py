"""The name of this library in `shoal`."""

from shoal.plugins.library import Library

LIBRARY = Library("tables", names={"few_rows": "shoal.libs.tables.few_rows:few_rows"})
