"""A run of the loop in this process, with actors as processes of this machine.

The trials of a sweep and the members of a population are such runs. Imports no Ray.
"""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from shoal.errors import ConfigError, RunError
from shoal.flows.actor_processes import ActorProcesses
from shoal.network_address import is_loopback
from shoal.rl.local_loop import LocalLoop, require_one_process
from shoal.rl.spec import RLSpec
from shoal.wire import ExperienceSpec

MEAN_RETURN = "mean_return"  # what such runs are compared by
ACTORS_END_S = 5.0  # after the gateway has ended their sessions


def require_local(spec: RLSpec) -> None:
    """Raise ConfigError for what such a run cannot have."""
    if spec.learn_from_endpoint:
        problem = "such a run has no endpoint"
        raise ConfigError("learn_from_endpoint", True, problem, "leave it out: its own actors teach it")
    require_one_process(spec)
    if spec.gateway.curve or not is_loopback(spec.gateway.host) or spec.gateway.port or spec.gateway.advertise:
        problem = "such a run has a gateway of its own, at a free port of its own machine"
        raise ConfigError("gateway", spec.gateway.host, problem, "leave out host, port, curve and advertise")


def find_python_path() -> str:
    """`$PYTHONPATH` for actors: a game may be in a module that is not installed, which they find where this process
    does."""
    own = [each for each in sys.path if not each.startswith((sys.prefix, sys.base_prefix))]
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *own]))


class LocalRun:
    """One learner with its gateway and its actors, which begin and end together. Use as a context manager.

    name:      in errors
    folder:    of its ledger, its checkpoints and its actors' logs
    seed:      of the first actor
    is_paused: the learner begins with a pause
    """

    def __init__(
        self,
        name: str,
        spec: RLSpec,
        experience: ExperienceSpec,
        folder: Path,
        num_actors: int,
        seed: int,
        is_paused: bool = False,
    ) -> None:
        self.name = name
        self.spec = spec
        self.experience = experience
        token = secrets.token_hex(16)
        self.loop = LocalLoop(spec, experience, folder, token)
        self.actors = ActorProcesses(folder, {"PYTHONPATH": find_python_path(), "SHOAL_TOKEN": token})
        self._num_actors = num_actors
        self._seed = seed
        self._is_paused = is_paused

    def start_actors(self) -> None:
        spec = self.spec
        self.actors.start(self._num_actors, self.loop.address, spec.env, seed=self._seed, ignored=spec.ignore)

    def require_actors(self) -> None:
        """Raise RunError when one has failed."""
        if dead := self.actors.describe_dead():
            raise RunError(f"{self.name} needs all of its actors: {'; '.join(dead)}")

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.callback(self.actors.finish, ACTORS_END_S)
            opened.enter_context(self.loop)
            if self._is_paused:
                self.loop.learner.pause()
            self.start_actors()
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()
