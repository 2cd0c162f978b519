"""Finders of learning rate and batch size, and ablation."""
