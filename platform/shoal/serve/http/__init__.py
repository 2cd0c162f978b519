"""The Open Inference Protocol over HTTP: an ASGI application."""
