"""A trained network as a model of the registry."""
