"""The controller that decides which versions answer: one for each endpoint, with its state on disk."""
