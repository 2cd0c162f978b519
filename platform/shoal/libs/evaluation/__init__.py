"""Episodes that are played through the endpoint of a run: its trials, its probes, and its evaluation."""
