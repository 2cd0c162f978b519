"""What clients speak: REST and gRPC, limits, keys, metrics. Asks a `ModelHost`, and knows no replica."""
