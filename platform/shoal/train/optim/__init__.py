"""Optimizers, learning-rate schedules, averaged weights, selective backpropagation."""
