"""A population of a Task's members as a run: its rounds, its record, and what is registered at the end."""
