"""How ranks reach each other: the process group, and shared memory between ranks of one host."""
