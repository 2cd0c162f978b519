"""Tensor parallelism: which layers can be split, how, and the proof that the split model computes the same."""
