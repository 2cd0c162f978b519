"""Every claim of speed, measured beside its peers: `make bench` runs all, `python -m benchmarks.NAME --quick` tries one."""
