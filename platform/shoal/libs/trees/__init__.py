"""Models over trees and DAGs of any shape, a batch at a time: nodes of one level of all trees are computed together."""

from shoal.errors import TreeError, needs_extra

with needs_extra("cluster"):
    from shoal.libs.trees.batch import TreeBatch
    from shoal.libs.trees.cell import Cell, Children, RecursiveCell, RecursiveTensorCell
    from shoal.libs.trees.lstm_cells import ChildSumLSTMCell, NaryLSTMCell
    from shoal.libs.trees.tree_rnn import TreeRNN

__all__ = [
    "Cell",
    "ChildSumLSTMCell",
    "Children",
    "NaryLSTMCell",
    "RecursiveCell",
    "RecursiveTensorCell",
    "TreeBatch",
    "TreeError",
    "TreeRNN",
]
