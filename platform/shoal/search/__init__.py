"""What a search may try: spaces of hyper-parameters. Sweeps, populations and their plots use it."""
