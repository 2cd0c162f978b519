"""Layers that behave under every plan as in one process: batch norm, dropout, precision, memory format."""
