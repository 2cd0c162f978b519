"""One actor-learner run, without actors: gateway and learner in this process ("local"), or as Ray workers ("ray").

    python -m benchmarks.ours.run local|ray '{"folder": ..., "spec": {...}, "words": ["a.b=c"], ...}'

Says its address, then obeys: `solved` waits for the target or a number of environment steps, `curve` for such a number,
`learnt` for one that the learner has learnt from, `stats` gives the gateway's, `published` the versions since the last
question, and `steps` how long each batch has taken since, without Ray. Ends when its input closes. The token is
$SHOAL_TOKEN. `benchmarks.ours.rl` has the other entries of a setting.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from benchmarks.balancing import still, write_checkpoint
from benchmarks.talk import commands, say
from shoal.actor.environment import make_environment
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire import ExperienceSpec


class Engine(Protocol):
    """What runs gateway and learner."""

    address: str

    def stats(self) -> dict[str, Any]: ...

    def learner_stats(self) -> dict[str, Any]: ...

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
        self._step_s: list[float] = []
        self._taken_version = 0
        pause_s, pause_factor = setting["pause_s"], setting["pause_factor"]

        def note(seconds: float) -> None:
            self._step_s.append(seconds)
            if pause := pause_s + pause_factor * seconds:
                time.sleep(pause)

        self._loop.learner.on_batch = note

    def stats(self) -> dict[str, Any]:
        return self._loop.gateway.stats()

    def learner_stats(self) -> dict[str, Any]:
        return self._loop.learner.stats()

    def published(self) -> list[tuple[int, float]]:
        published = self._loop.learner.take_published(self._taken_version)
        self._taken_version = max([self._taken_version, *(one.version for one in published)])
        return [(one.version, one.published_at) for one in published]

    def take_step_s(self) -> list[float]:
        """How long each batch since the last call took."""
        taken, self._step_s[:] = list(self._step_s), []
        return taken


class RayEngine:
    """Workers on an embedded cluster of its own, as `shoal run` starts them."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, setting: dict[str, Any], closing: ExitStack) -> None:
        from shoal.cluster.embedded_cluster import start_cluster

        cluster = closing.enter_context(start_cluster())
        os.environ.update(cluster.environment)  # before anything imports Ray
        import ray

        from shoal.cluster.job_main import connect
        from shoal.rl.gateway.state import GatewaySetting
        from shoal.rl.ray_workers import ActorLearnerWorkers

        connect()
        closing.callback(ray.shutdown)
        folder = Path(setting["folder"])
        token = os.environ["SHOAL_TOKEN"]
        of_gateway = GatewaySetting.of_run(
            spec, experience, folder, token, run_id=folder.name, target_return=setting["target_return"]
        )
        self._workers = ActorLearnerWorkers(spec, of_gateway)
        closing.callback(self._workers.close)
        closing.callback(self._workers.close_gateway)
        self.address = self._workers.wait_for_gateway()["address"]

    def stats(self) -> dict[str, Any]:
        return self._workers.stats()[0] or {}

    def learner_stats(self) -> dict[str, Any]:
        return self._workers.stats()[1] or {}

    def published(self) -> list[tuple[int, float]]:
        return [(one.version, one.published_at) for one in self._workers.take_published()]


ENGINES: dict[str, type[LocalEngine] | type[RayEngine]] = {"local": LocalEngine, "ray": RayEngine}


def wait_learnt(engine: Engine, num_steps: int, timeout_s: float) -> dict[str, Any]:
    """Until the learner has learnt from `num_steps`: the mean return then, the mean age in versions of the batches that
    were looked at, and what became of the segments."""
    deadline_s, lags = time.monotonic() + timeout_s, list[float]()
    while True:
        learner = engine.learner_stats()
        lags.append(learner["metrics"].get("learner/policy_lag", 0.0))
        if learner["steps"] >= num_steps or time.monotonic() > deadline_s:
            stats = engine.stats()
            found = {name: stats[name] for name in ("mean_return", "segments")}
            return {**found, "steps": learner["steps"], "updates": learner["updates"], "lag": sum(lags) / len(lags)}
        time.sleep(0.1)


def wait_solved(engine: Engine, timeout_s: float, num_steps: float = math.inf) -> dict[str, Any]:
    """Seconds from the first segment and steps until the target return, or until so many steps are made; seconds is
    None when it was not reached. The curve until then has a point each 0.2 s: steps and mean return. `lag` is the mean
    age in versions of the batches that were looked at."""
    deadline_s, points, lags = time.monotonic() + timeout_s, list[tuple[int, float]](), list[float]()
    while True:
        stats = engine.stats()
        if stats["episodes"]:
            points.append((stats["steps"], float(f"{stats['mean_return']:.5g}")))
        lags.append(engine.learner_stats()["metrics"].get("learner/policy_lag", 0.0))
        if stats["solved_s"] is not None or stats["steps"] >= num_steps or time.monotonic() > deadline_s:
            steps, lag = stats["solved_steps"] or stats["steps"], sum(lags) / len(lags)
            return {"seconds": stats["solved_s"], "steps": steps, "points": points, "lag": lag}
        time.sleep(0.2)


def wait_steps(engine: Engine, num_steps: int, timeout_s: float, num_points: int) -> dict[str, Any]:
    """The curve until actors have made `num_steps`: seconds since the first segment, steps, and the mean return of the
    last 100 episodes, at `num_points` evenly spaced numbers of steps; fewer when the time is over before."""
    deadline_s = time.monotonic() + timeout_s
    points: list[tuple[float, int, float]] = []
    while True:
        stats = engine.stats()
        is_over = stats["steps"] >= num_steps or time.monotonic() > deadline_s
        if is_over or (stats["episodes"] and stats["steps"] >= num_steps * (len(points) + 1) / num_points):
            seconds = time.time() - (stats["first_segment_at"] or time.time())
            points.append((round(seconds, 2), stats["steps"], round(stats["mean_return"], 3)))
        if is_over:
            segments = stats["segments"]
            return {"points": points, "episodes": stats["episodes"], "segments": segments}
        time.sleep(0.1)


def main(name: str, setting: dict[str, Any]) -> None:
    if setting["batches_ahead"]:
        num_batches = setting["batches_ahead"]
        RLSpec.steps_ahead = property(lambda spec: num_batches * spec.batch_limits[0])  # type: ignore[method-assign,assignment]
    spec = RLSpec.parse(setting["spec"]).override(setting["words"])
    environment = make_environment(spec.env)
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
                    say(**wait_solved(engine, command["timeout_s"], command.get("steps", math.inf)))
                case "curve":
                    say(**wait_steps(engine, command["steps"], command["timeout_s"], command["points"]))
                case "learnt":
                    say(**wait_learnt(engine, command["steps"], command["timeout_s"]))
                case "stats":
                    say(**engine.stats())
                case "published":
                    say(versions=engine.published())
                case "steps":
                    assert isinstance(engine, LocalEngine)
                    say(seconds=engine.take_step_s())


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
