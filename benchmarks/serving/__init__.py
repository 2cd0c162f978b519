"""Serving beside its peers: one driver, one set of models, the same bytes for every server.

`driver` is the load generator (closed loop, and open loop with Poisson arrivals), `drive` runs it as a child and reads
what it found, `workloads` has the models, `servers` starts ours and the peers'. Each table is a module with a `main`.
"""
