"""Dynamic batching: the order of waiting requests and the content of each batch. Imports nothing else of serving."""
