"""The latency of replicas under a load, and the replicas that a rate needs: simulations of the batcher."""
