"""The algorithms of this library, by the words of `algorithm=`."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "off_policy",
    extensions={
        "shoal.algorithms": {
            "dqn": "shoal.libs.off_policy.dqn.config:DQNConfig",
            "sac": "shoal.libs.off_policy.sac.config:SACConfig",
            "r2d2": "shoal.libs.off_policy.r2d2.config:R2D2Config",
        }
    },
)
