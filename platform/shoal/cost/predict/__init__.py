"""What a step will cost: dry runs without data, in a fake process group."""
