"""Runs of the loop with several policies, each of which plays agents of its own in one environment."""
