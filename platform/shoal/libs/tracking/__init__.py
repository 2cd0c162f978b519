"""Trackers of runs: MLflow, Weights & Biases, Trackio."""
