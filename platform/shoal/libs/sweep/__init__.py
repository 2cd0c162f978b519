"""Searches for a task's best hyper-parameters."""
