"""Smaller versions of a registered model, by distillation, precision and export. Called by `shoal optimise`."""
