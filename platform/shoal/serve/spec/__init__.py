"""What a user writes of an endpoint: its models, their sources and options."""
