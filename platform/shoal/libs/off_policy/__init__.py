"""Learning from experience of any age: DQN, R2D2 and SAC, each with a replay."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "off_policy",
    extensions={
        "shoal.algorithms": {
            "dqn": "shoal.libs.off_policy.configs:DQNConfig",
            "sac": "shoal.libs.off_policy.configs:SACConfig",
            "r2d2": "shoal.libs.off_policy.configs:R2D2Config",
        }
    },
)
