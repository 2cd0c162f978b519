"""Claims of speed, measured beside the peers: `make bench` runs all, `python -m benchmarks.NAME --quick` tries one."""
