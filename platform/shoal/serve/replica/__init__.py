"""A process that answers: its models, their loaded versions, and the version that answers a call."""
