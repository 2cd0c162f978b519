"""Commands that start a run, and what they share."""
