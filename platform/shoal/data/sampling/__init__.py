"""Which samples come in which order, and on which worker."""
