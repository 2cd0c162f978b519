"""The Open Inference Protocol over gRPC, carried by HTTP/1.1 behind HAProxy: a protocol of an endpoint."""
