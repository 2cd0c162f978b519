"""Prediction of a step's cost: dry runs without data, in a fake process group."""
