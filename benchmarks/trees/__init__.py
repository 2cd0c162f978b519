"""Models over trees beside recursion, DyNet, `nn.LSTM` and torch.compile: `python -m benchmarks.trees`."""
