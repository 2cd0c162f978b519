"""Communication between ranks: the process group, and shared memory between ranks of one host."""
