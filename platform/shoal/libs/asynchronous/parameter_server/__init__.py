"""Asynchronous training: servers apply the gradients that workers push, and workers pull weights."""
