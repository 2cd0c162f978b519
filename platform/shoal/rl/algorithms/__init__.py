"""One folder per algorithm: config, pure loss, update. No clock, device, run or Ray."""
