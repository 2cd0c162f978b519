"""The names of this library: `shoal.tabular`, and `shoal.data.table`."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "tabular",
    extensions={
        "shoal.data_names": {"table": "shoal.libs.tabular.dataset:table"},
        "shoal.panels": {"training": "shoal.libs.tabular.trees:PANELS"},
    },
    names={"tabular": "shoal.libs.tabular"},
)
