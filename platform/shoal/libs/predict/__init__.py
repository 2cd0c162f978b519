"""`shoal predict`: requests to an endpoint from the shell."""
