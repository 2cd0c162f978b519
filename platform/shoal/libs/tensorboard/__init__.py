"""The metrics of runs for TensorBoard."""
