"""Endpoints: a model behind HTTP that batches without a timeout and follows new weights without dropping a request."""
