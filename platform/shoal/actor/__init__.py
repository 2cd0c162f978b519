"""What an external process imports to act for a run: no torch, no ray, no platform.

    from shoal.actor import ActorClient, MlpPolicy, play

`ActorClient` speaks to a gateway; `play` plays a gymnasium-like environment through it; `MlpPolicy` runs the
pulled weights in NumPy. `python -m shoal.actor --connect ADDRESS --env CartPole-v1` is the ready program.
"""

from shoal.actor.client import ActorClient
from shoal.actor.environment_loop import play
from shoal.actor.policy import MlpPolicy

__all__ = ["ActorClient", "MlpPolicy", "play"]
