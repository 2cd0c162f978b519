"""Launchers of training runs: in this process, or as a worker group of Ray Train."""
