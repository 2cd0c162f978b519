"""Synchronous training whose workers may die, leave and join: `sync=all_reduce` with `workers=[min, max]`."""
