"""The cost of a step, measured while it runs: FLOPs, memory, bytes sent."""
