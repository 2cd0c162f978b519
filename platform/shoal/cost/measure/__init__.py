"""What a step costs as it runs: FLOPs, memory, bytes sent."""
