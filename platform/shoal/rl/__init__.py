"""Reinforcement learning from actors that the platform does not spawn: gateway, ledger, queue, learner."""
