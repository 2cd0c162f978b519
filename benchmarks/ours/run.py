"""One actor-learner run, without actors: gateway and learner in this process ("local"), or as Ray workers ("ray").

    python -m benchmarks.ours.run local|ray '{"folder": ..., "spec": {...}, "balancing": false, "target_return": null}'

Says its address, then obeys: `solved` waits for the target, `stats` gives the gateway's, `published` the versions since
the last question. Ends when its input closes. The token is $SHOAL_TOKEN.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import gymnasium

from benchmarks.balancing import still, write_checkpoint
from benchmarks.talk import commands, say
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire import ExperienceSpec


class Engine(Protocol):
    """What runs gateway and learner."""

    address: str

    def stats(self) -> dict[str, Any]: ...

    def published(self) -> list[tuple[int, float]]:
        """Version and time of publication (Unix) of what was published since the last call."""
        ...


class LocalEngine:
    """Threads of this process."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, setting: dict[str, Any], closing: ExitStack) -> None:
        from shoal.rl.local_loop import LocalLoop

        folder, token = Path(setting["folder"]), os.environ["SHOAL_TOKEN"]
        self._loop = closing.enter_context(LocalLoop(spec, experience, folder, token, setting["target_return"]))
        self.address = self._loop.address

    def stats(self) -> dict[str, Any]:
        return self._loop.gateway.stats()

    def published(self) -> list[tuple[int, float]]:
        return [(one.version, one.published_at) for one in self._loop.learner.take_published()]


class RayEngine:
    """Workers on an embedded cluster of its own, as `shoal run` starts them."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, setting: dict[str, Any], closing: ExitStack) -> None:
        from shoal.cluster.embedded_cluster import start_cluster

        cluster = closing.enter_context(start_cluster())
        os.environ.update(cluster.environment)  # before anything imports Ray
        import ray

        from shoal.cluster.job_main import connect
        from shoal.rl.ray_workers import ActorLearnerWorkers, RunSetting

        connect()
        closing.callback(ray.shutdown)
        folder = Path(setting["folder"])
        run = RunSetting(folder.name, folder, os.environ["SHOAL_TOKEN"], setting["target_return"], None)
        self._workers = ActorLearnerWorkers(spec, experience, run)
        closing.callback(self._workers.close)
        closing.callback(self._workers.close_gateway, finished=True)
        self.address = self._workers.wait_for_gateway()

    def stats(self) -> dict[str, Any]:
        return self._workers.stats()[0] or {}

    def published(self) -> list[tuple[int, float]]:
        return [(one.version, one.published_at) for one in self._workers.take_published()]


ENGINES: dict[str, type[LocalEngine] | type[RayEngine]] = {"local": LocalEngine, "ray": RayEngine}


def wait_solved(engine: Engine, timeout_s: float) -> dict[str, Any]:
    """Seconds from the first segment and steps until the target return; seconds is None when it was not reached."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        stats = engine.stats()
        if stats["solved_s"] is not None or time.monotonic() > deadline_s:
            return {"seconds": stats["solved_s"], "steps": stats["solved_steps"] or stats["steps"]}
        time.sleep(0.1)


def main(name: str, setting: dict[str, Any]) -> None:
    spec = RLSpec.parse(setting["spec"])
    environment = gymnasium.make(spec.env)
    experience = experience_spec(environment.observation_space, environment.action_space, spec)
    folder = Path(setting["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    if setting["still"] or setting["balancing"]:
        spec = still(spec)
    if setting["balancing"]:
        write_checkpoint(spec, experience, folder / "checkpoints")
    with ExitStack() as closing:
        engine = ENGINES[name](spec, experience, setting, closing)
        say(address=engine.address)
        for command in commands():
            match command["do"]:
                case "solved":
                    say(**wait_solved(engine, command["timeout_s"]))
                case "stats":
                    say(**engine.stats())
                case "published":
                    say(versions=engine.published())


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
