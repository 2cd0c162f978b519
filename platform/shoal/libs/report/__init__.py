"""The report of a run: one HTML page, and its learning curve as a picture."""
