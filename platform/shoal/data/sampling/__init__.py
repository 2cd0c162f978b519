"""The order of samples, and their assignment to ranks and workers."""
