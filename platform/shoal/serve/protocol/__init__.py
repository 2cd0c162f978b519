"""The parts common to REST and gRPC: limits, keys, metrics. Uses a `ModelManagerProtocol`, and knows no replica."""
