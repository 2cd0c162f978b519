"""A process that answers: its models, which versions of them are loaded, and who answers a call."""
