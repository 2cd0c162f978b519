"""What clients speak: REST and gRPC, limits, keys, metrics. Asks a `ModelManagerProtocol`, and knows no replica."""
