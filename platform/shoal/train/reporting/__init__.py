"""What a training run reports: events, console lines, the result."""
