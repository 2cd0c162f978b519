"""Runs a model over tables: columns in, columns out."""
