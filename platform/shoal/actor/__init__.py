"""The package for external actors: no torch, no ray, no platform.

    from shoal.actor import ActorClient, make_policy, play

`ActorClient` connects to a gateway; `play` runs a gymnasium-like environment through it; `make_policy` gives the run's
policy, an `MlpPolicy`, which evaluates the pulled weights in NumPy. `python -m shoal.actor --connect ADDRESS --env
CartPole-v1` is the bundled actor.
"""

from shoal.actor.client import ActorClient
from shoal.actor.environment_loop import play
from shoal.actor.game import GameActor
from shoal.actor.policy import MlpPolicy, make_policy
from shoal.actor.remote import RemoteActor, RemoteClient

__all__ = ["ActorClient", "GameActor", "MlpPolicy", "RemoteActor", "RemoteClient", "make_policy", "play"]
