"""Agents elsewhere: their sessions over HTTP, the tokens of their turns, and the learner of what they have sampled."""

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
    needs=("hf", "language"),
    heading="play",
)
