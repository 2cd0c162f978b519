"""How samples are read: by index, or from an iterable."""
