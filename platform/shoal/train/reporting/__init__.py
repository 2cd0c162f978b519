"""The reports of a training run: events, console lines, the result."""
