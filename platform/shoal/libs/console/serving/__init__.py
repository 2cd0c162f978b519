"""What serves, and what it serves: models, endpoints, *Try it*, and the clusters below them."""
