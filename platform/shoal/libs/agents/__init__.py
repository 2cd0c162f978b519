"""Agents that run elsewhere: their text as one more kind of experience, and the algorithms that learn from it."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "agents",
    extensions={
        "shoal.algorithms": {
            "grpo": "shoal.libs.agents.config:GRPOConfig",
            "rloo": "shoal.libs.agents.config:RLOOConfig",
            "reinforce_pp": "shoal.libs.agents.config:ReinforcePPConfig",
        }
    },
)
