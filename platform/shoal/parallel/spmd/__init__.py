"""Plans in which each rank runs the whole forward pass: one process, DDP, FSDP."""
