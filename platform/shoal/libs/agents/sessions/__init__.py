"""Sessions of agents over HTTP: their tokens, groups, credit and accounts, beside the gateway of a run."""
