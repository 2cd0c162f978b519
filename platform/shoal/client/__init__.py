"""What asks an endpoint: `Client` and `AsyncClient`, NumPy in and out."""
