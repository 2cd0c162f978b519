"""Sweeps: many trials of one Task over a search space, on Ray Tune."""
