"""One file an algorithm, top to bottom: config, pure loss, update. No clock, device, run or Ray."""
