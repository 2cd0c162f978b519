"""The shells that run serving's objects in Ray Serve and in Ray actors."""
