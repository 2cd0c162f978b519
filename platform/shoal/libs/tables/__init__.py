"""Regression from one to twenty rows by a network that was trained on generated tables.

network      the transformer, its densities, and `predict` for a user's table
tokens       a table as features of its cells and rows
closed_form  Bayesian regressors, which the network weighs
prior        the tables that it is trained on
"""

from shoal.plugins.library import Library

LIBRARY = Library("tables", names={"few_rows": "shoal.libs.tables.few_rows:few_rows"})
