"""What an actor's policy computes beyond layers: features of frames in NumPy, and graphs of a user's own network."""
