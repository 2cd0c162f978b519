"""Models of an endpoint that write text: engines on the batcher of a replica."""
