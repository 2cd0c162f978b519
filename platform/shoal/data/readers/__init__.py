"""Reading samples by index, or from an iterable."""
