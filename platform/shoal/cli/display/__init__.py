"""Live views of runs and endpoints, drawn from the run record."""
