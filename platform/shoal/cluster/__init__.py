"""Ray for Shoal: start an embedded cluster or attach to one, authenticate, submit jobs, ship the package."""
