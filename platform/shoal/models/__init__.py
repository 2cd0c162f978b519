"""Plain `nn.Module`s that know nothing of distribution, of runs, or of who trains and serves them."""
