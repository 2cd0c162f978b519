"""What a GPU gains and costs, in sections of one process each; `python -m benchmarks.gpu`, without Ray."""
