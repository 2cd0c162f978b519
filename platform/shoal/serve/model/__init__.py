"""One model as a function of batches: its format, device, precision and hooks, and what it promises."""
