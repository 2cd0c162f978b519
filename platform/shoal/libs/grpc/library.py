"""The protocol that this library adds to endpoints."""

from shoal.plugins.library import Library

LIBRARY = Library("grpc", extensions={"shoal.protocols": {"grpc": "shoal.libs.grpc.app:make_app"}})
