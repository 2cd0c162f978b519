"""The Open Inference Protocol over gRPC, carried by HTTP/1.1 behind HAProxy: a protocol of an endpoint."""

from shoal.plugins.library import Library

LIBRARY = Library("grpc", extensions={"shoal.protocols": {"grpc": "shoal.libs.grpc.app:make_app"}})
