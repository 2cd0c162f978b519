"""The shells that hold serving's objects in Ray Serve and in Ray actors."""
