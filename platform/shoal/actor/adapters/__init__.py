"""Other forms of environments, made into those that the ready loop plays."""
