"""Plans in which each rank runs the full forward pass: one process, DDP, FSDP."""
