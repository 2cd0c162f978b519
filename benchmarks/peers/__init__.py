"""The peers' side of each comparison, as processes that a benchmark starts. They run in .venv-peers, without shoal;
DyNet in .venv-dynet."""
