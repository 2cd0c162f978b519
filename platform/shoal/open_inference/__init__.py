"""The Open Inference Protocol v2 as data: messages, datatypes, tensors in JSON and in bytes; for server and client."""
