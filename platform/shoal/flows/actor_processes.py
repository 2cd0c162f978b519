"""Actors that a program starts for a run, as processes of this machine, and ends with it.

Each one has a lifeline: it ends when its standard input closes, so that none outlives the program that started it,
however that ends. Called by `shoal run --actors`, by trials of a sweep and by members of a population.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.actor.connection import format_actor_options
from shoal.cluster.processes import Program, end_programs, start_program, wait_for_programs

TERMINATION_TIMEOUT_S = 3.0  # after SIGTERM, before an actor is killed


class ActorProcesses:
    """The actors of one run; their output is in `folder`, `actor-0.log` and so on. `finish` or `end` them.

    environment: variables beside those of this process, such as the token
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._actors: list[Program] = []

    def start(
        self,
        number: int,
        address: str,
        env: str,
        server_key: str = "",
        options: Sequence[str] = (),
        seed: int = 0,
        ignored: Sequence[str] = (),
        record_every: int = 0,
    ) -> None:
        """Start `number` actors that connect to the gateway at `address`. seed: of the first one's environment;
        record_every: the first one films one of so many episodes, into this folder"""
        known = format_actor_options(address, env, server_key, ignored)
        command = [sys.executable, "-m", "shoal.actor", "--lifeline", *known]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **self._environment}
        for index in range(number):
            own = ["--actor-id", f"actor-{index}", "--seed", str(seed + index)]
            if record_every and not index:
                own += ["--record", str(self._folder / "films"), "--record-every", str(record_every)]
            self._actors.append(start_program([*command, *options, *own], self._get_log(index), variables))

    @property
    def are_all_dead(self) -> bool:
        """Whether there were actors, and each has ended with an error."""
        return bool(self._actors) and all(actor.poll() for actor in self._actors)

    def describe_dead(self) -> list[str]:
        """A line for each actor that has ended with an error."""
        dead = [(index, actor.poll()) for index, actor in enumerate(self._actors) if actor.poll()]
        return [f"actor-{index} ended with status {code}: {self._read_last_log_line(index)}" for index, code in dead]

    def finish(self, timeout_s: float) -> None:
        """The gateway has ended their sessions: give them a moment to exit, then `end` them."""
        wait_for_programs(self._actors, timeout_s)
        self.end()

    def end(self) -> None:
        """End all that still run, and forget them: others may be started. Idempotent."""
        end_programs(self._actors, TERMINATION_TIMEOUT_S)
        self._actors.clear()

    def _get_log(self, index: int) -> Path:
        return self._folder / f"actor-{index}.log"

    def _read_last_log_line(self, index: int) -> str:
        lines = self._get_log(index).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
