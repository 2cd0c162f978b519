"""Mirroring of the run record to trackers of the user's: MLflow, Weights & Biases, Trackio."""
