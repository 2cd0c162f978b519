"""Prediction of a step's cost: ranks of a plan one by one, without the others, in a fake process group."""
