"""The package for external actors: no torch, no ray, no platform.

    from shoal.actor import ActorClient, MlpPolicy, play

`ActorClient` connects to a gateway; `play` runs a gymnasium-like environment through it; `MlpPolicy` evaluates the
pulled weights in NumPy. `python -m shoal.actor --connect ADDRESS --env CartPole-v1` is the bundled actor.
"""

from shoal.actor.client import ActorClient
from shoal.actor.environment_loop import play
from shoal.actor.policy import MlpPolicy

__all__ = ["ActorClient", "MlpPolicy", "play"]
