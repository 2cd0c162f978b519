"""A user's spec of an endpoint: its models, their sources and options."""
