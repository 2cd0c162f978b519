"""Tables of numbers, words, dates, truths and gaps: from a file to a network whose requests are rows as they are.

Owns the encoders, which are fitted to the training rows alone and travel with the model, a default network, and the
Task that joins them. Called as `shoal.data.table`, by `shoal run table`, and by Tasks of users. Names that need torch
are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.libs.tabular.dataset import Table, table
    from shoal.libs.tabular.encoders import Encoders
    from shoal.libs.tabular.network import ColumnEmbedding, TableNetwork
    from shoal.libs.tabular.task import TableTask

__all__ = ["ColumnEmbedding", "Encoders", "Table", "TableNetwork", "TableTask", "table"]

_HOMES = {"Encoders": "encoders", "ColumnEmbedding": "network", "TableNetwork": "network", "TableTask": "task"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name, "dataset")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
