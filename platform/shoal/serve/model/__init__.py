"""One model as a function of batches: its format, device, precision, hooks and signature."""
