"""A run of reinforcement learning in this process, for tests: the gateway, ledger, queue and learner of a real one.

Games connect over the wire, as always. The learner takes its steps where the test says so. Called by tests: those of
users, and ours.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from shoal.actor import ActorClient, RemoteClient, play
from shoal.actor.environment import open_environment
from shoal.actor.remote import run_remote_actor
from shoal.flows.rl_policy import inspect_environment
from shoal.rl.experience.queue import BatchRequest, ExperienceBatch
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec

TOKEN = "a token of the tests"


class Loop(LocalLoop):
    """A run for the length of a `with` block.

    env:       as `shoal run actor_learner env=...` takes it: an id of gymnasium, or `file.py:MyGame`
    folder:    of its ledger and checkpoints; with the same one, a later run continues
    overrides: fields of an RLSpec: "algorithm=ppo", "learner.batch_steps=64"
    inference: "local", or "remote": where the policy of its actors runs

    Raises ConfigError for a game that cannot be learnt from.
    """

    def __init__(self, env: str, folder: Path, *overrides: str, inference: str = "local") -> None:
        self.spec = RLSpec().override([f"env={env}", *overrides])
        self._inference = inference
        self._actors: list[threading.Thread] = []
        super().__init__(self.spec, inspect_environment(self.spec, inference)[0], folder, TOKEN)

    def start(self) -> None:
        self.gateway.start()
        self.change_settings(self.gateway.setting.settings)

    def play(self, max_steps: int | None = None, seed: int | None = None) -> int:
        """An actor plays the game in this thread until the run is over, or for `max_steps`, which must fit into the
        queue; returns the number of agents' steps."""
        number = len(self._actors)
        with open_environment(self.spec.env, self.spec.ignore) as environment:
            if self._inference == "local":
                with ActorClient(self.address, TOKEN, f"actor-{number}") as client:
                    return play(environment, client, seed, max_steps)
            with RemoteClient(self.address, TOKEN, f"actor-{number}") as remote:
                return run_remote_actor(environment, remote, seed, max_steps)

    def start_actor(self, seed: int | None = None) -> None:
        """An actor plays the game in a thread until the block ends."""
        actor = threading.Thread(target=self.play, kwargs={"seed": seed}, daemon=True)
        self._actors.append(actor)
        actor.start()

    def learn(self, num_batches: int = 1, timeout_s: float = 60.0) -> None:
        """Learn from so many batches of what actors play, or have played. Raises TimeoutError where none comes."""
        for _ in range(num_batches):
            deadline = time.monotonic() + timeout_s
            while not self.learner.step():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no batch within {timeout_s} s")

    def take(self, min_steps: int = 1, timeout_s: float = 60.0) -> ExperienceBatch:
        """What games have sent, in place of the learner, which does not get it. Raises TimeoutError."""
        batch = self.queue.take("a test", BatchRequest(min_steps, 2**31, 2**31, timeout_s))
        if batch is None:
            raise TimeoutError(f"not {min_steps} steps within {timeout_s} s")
        return batch

    def close(self) -> None:
        super().close()
        for actor in self._actors:
            actor.join()
