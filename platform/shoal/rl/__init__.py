"""Reinforcement learning from external actors: gateway, ledger, queue, learner."""
