"""Agents elsewhere: their sessions over HTTP, the tokens of their turns, and the learner of what they have sampled."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "agents",
    verbs={
        "sessions": (
            "shoal.libs.agents.command:sessions",
            "The sessions of a run of agents: list them, read one, write what they said for fine-tuning.",
        ),
        "evaluate": (
            "shoal.libs.agents.command:evaluate",
            "Let a registered language model answer tasks, and print its rewards.",
        ),
    },
    displays={"agents": "shoal.libs.agents.display"},
    extensions={
        "shoal.algorithms": {
            "grpo": "shoal.libs.agents.config:GRPOConfig",
            "rloo": "shoal.libs.agents.config:RLOOConfig",
            "reinforce_pp": "shoal.libs.agents.config:ReinforcePPConfig",
        },
        "shoal.panels": {"agents": "shoal.libs.agents.report:PANELS"},
    },
    needs=("hf", "language"),
    heading="play",
)
