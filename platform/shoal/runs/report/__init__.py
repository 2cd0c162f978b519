"""The one-page HTML report of a run."""
