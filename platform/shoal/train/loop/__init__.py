"""The loop of one rank: the trainer and its components."""
