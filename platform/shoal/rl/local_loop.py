"""The whole loop in one process, without Ray: the same gateway, ledger, queue, learner and weight store, in threads.

For debugging, tests and learning how the parts fit: a few lines wire everything that `ray_workers.py` distributes.
Actors connect over the wire as always.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import torch

from shoal.actor.environment import ASK
from shoal.atomic_file import make_folder
from shoal.errors import ConfigError, RunError
from shoal.random_state import preserve_rng
from shoal.rl.first_game import WAITING_PRINT_S, FirstGame, describe_given, describe_waiting
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.listener import OpenFront, format_websocket_address
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.learner import Learner
from shoal.rl.spec import RLSpec
from shoal.runs.waits import print_line
from shoal.weights import WeightStore
from shoal.wire import ExperienceSpec
from shoal.wire.messages import GameSettings

CLOSE_TIMEOUT_S = 30.0  # for the learner's last update


def require_one_process(spec: RLSpec) -> None:
    """Raise ConfigError for what needs the workers of a cluster."""
    if spec.learner.replicas > 1:
        problem = "needs a cluster, and this loop is one process"
        raise ConfigError("learner.replicas", spec.learner.replicas, problem, "use 1, or shoal run")
    if spec.gateway.shards > 1:
        problem = "are processes, and this loop is one"
        raise ConfigError("gateway.shards", spec.gateway.shards, problem, "use 1, or shoal run")
    if spec.gateway.durable == "store":
        problem = "is for a gateway that may begin again elsewhere, and this loop is one process"
        raise ConfigError("gateway.durable", "store", problem, "use disk, or shoal run")
    if spec.rules:
        problem = "are followed by the job of a run, and this loop is one of several"
        raise ConfigError("rules", list(spec.rules), problem, "leave them out, or shoal run actor_learner")


class LocalLoop:
    """A run in this process, its files in `folder`. Use as a context manager, or `start()` and `close()`."""

    def __init__(
        self,
        spec: RLSpec,
        experience: ExperienceSpec,
        folder: Path,
        token: str,
        target_return: float | None = None,
        front: OpenFront | None = None,
    ) -> None:
        require_one_process(spec)
        make_folder(folder)
        with ExitStack() as closing:
            closing.callback(torch.set_num_threads, torch.get_num_threads())  # the learner sets the process's
            closing.enter_context(preserve_rng(has_cuda=False))
            self.store = WeightStore()
            setting = GatewaySetting.of_run(
                spec,
                experience,
                folder,
                token,
                run_id=folder.name,
                target_return=target_return,
                settings=spec.settings,
                front=front,
            )
            setting.site.prepare()
            self.gateway = Gateway.of_run(spec, setting, self.store)
            self.queue, self.ledger = self.gateway.queue, self.gateway.queue.ledger
            self.learner = Learner.of_run(spec, setting.site, self.queue, self.store)
            self._closing = closing.pop_all()
        self._closed = False

    @classmethod
    def open(
        cls,
        spec: RLSpec,
        folder: Path,
        token: str,
        target_return: float | None = None,
        say: Callable[[str], None] = print_line,
    ) -> Self:
        """A run with the spaces of `spec.env`. With `env=ask` this waits for the first game, and `say` gets what to do
        meanwhile. Raises ConfigError."""
        if spec.env == ASK:
            game = FirstGame(spec, folder, token)
            try:
                while not game.env:
                    say(describe_waiting(game.format_addresses()))
                    game.wait(WAITING_PRINT_S)
            finally:
                game.close()
            spec = spec.update({"env": game.env})
        return cls(spec, describe_given(spec)[0], folder, token, target_return)

    def start(self) -> None:
        self.gateway.start()
        self.change_settings(self.gateway.setting.settings)  # where the ledger has others
        self.learner.thread.start()

    @property
    def address(self) -> str:
        return self.gateway.address

    @property
    def websocket_address(self) -> str:
        """For games that speak WebSocket; empty without `gateway.websocket`."""
        return format_websocket_address(self.gateway.listener, self.gateway.spec.host)

    def change_settings(self, values: GameSettings) -> None:
        """Tell the games these settings, and forget others."""
        self.gateway.set_settings(values)

    def wait_until_solved(self, timeout_s: float) -> float:
        """Wait for the target return; returns the seconds from the first segment. Raises RunError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            stats = self.gateway.stats()
            if stats["solved_s"] is not None:
                return float(stats["solved_s"])
            self.require_learner()
            self.learner.thread.join(timeout=0.05)
        raise RunError(f"not solved within {timeout_s} s: mean return {self.gateway.stats()['mean_return']:.4g}")

    def require_learner(self) -> None:
        """Raise RunError when the learner has failed."""
        if (error := self.learner.error) is not None:
            raise RunError(f"the learner failed: {error}") from error

    def close(self) -> None:
        """Stop the learner, end the actors, close the ledger. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.learner.finish(CLOSE_TIMEOUT_S)
        with self._closing as closing:  # close each part, even if the disk is full
            closing.callback(self.ledger.close)
            closing.callback(self.store.close)
            closing.callback(self.gateway.close, finished=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
