"""A replica that is several workers: its models are split between them, each of which has a part of the weights."""
