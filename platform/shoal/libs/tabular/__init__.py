"""Tables of numbers, words, dates, truths and gaps: from a file to a network whose requests are rows as they are.

Owns the encoders, which are fitted to the training rows alone and travel with the model, a default network, and the
Task that joins them. Called as `shoal.data.table`, by `shoal run table`, and by Tasks of users. Names that need torch
are imported at their first use.
"""

from typing import TYPE_CHECKING

from shoal.extend import load_on_demand
from shoal.plugins.library import Library

if TYPE_CHECKING:
    from shoal.libs.tabular.dataset import Table as Table
    from shoal.libs.tabular.dataset import table as table
    from shoal.libs.tabular.encoders import Encoders as Encoders
    from shoal.libs.tabular.network import ColumnEmbedding as ColumnEmbedding
    from shoal.libs.tabular.network import TableNetwork as TableNetwork
    from shoal.libs.tabular.task import TableTask as TableTask

LIBRARY = Library(
    "tabular",
    extensions={
        "shoal.data_names": {"table": "shoal.libs.tabular.dataset:table"},
        "shoal.panels": {"training": "shoal.libs.tabular.trees:PANELS"},
    },
    names={"tabular": "shoal.libs.tabular"},
)

__getattr__ = load_on_demand(__name__)
