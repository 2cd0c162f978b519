"""What decides which versions answer: one for an endpoint, with its state on disk."""
