"""Kill the gateway, the learners and the weight store of a real run; the run goes on and the books balance."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import pytest

import shoal.runs
from shoal.libs.chaos.plan import Fault
from shoal_program import Program
from waiting import wait_for

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster
    from shoal.rl.ray_workers import ActorLearnerWorkers

TOKEN = "a token of the tests"
STATE_S = 400.0
ORDINARY = ("shutdown", "stale_admission", "stale_consumption")  # drops that need no fault
CRASHES = ("gateway_crash", "learner_crash", "lease_lost")


class Loop:
    """The workers of one run, and the external actors that were started for it."""

    def __init__(self, folder: Path, run_id: str, *words: str) -> None:
        from shoal.rl.gateway.state import GatewaySetting
        from shoal.rl.ray_workers import ActorLearnerWorkers
        from shoal.rl.spec import RLSpec, experience_spec

        folder.mkdir(parents=True)
        spec = RLSpec().override(
            [
                "learner.checkpoint_every_s=0.2",
                "learner.batch_steps=512",
                "gateway.heartbeat_s=0.2",
                "gateway.timeout_s=2",
                "hidden=[16]",
                *words,
            ]
        )
        environment = gymnasium.make(spec.env)
        experience = experience_spec(environment.observation_space, environment.action_space, spec)
        setting = GatewaySetting.of_run(spec, experience, folder, TOKEN, run_id=run_id)
        self.workers: ActorLearnerWorkers = ActorLearnerWorkers(spec, setting)
        self.actors: list[Program] = []
        self._ending = ExitStack()

    def __enter__(self) -> Loop:
        self._ending.callback(self.workers.close)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._ending.__exit__(*raised)

    def start_actor(self, actor_id: str) -> Program:
        address = self.workers.wait_for_gateway()["address"]
        words = [sys.executable, "-m", "shoal.actor", "--connect", address, "--env", "CartPole-v1"]
        environment = {**os.environ, "SHOAL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        actor = self._ending.enter_context(Program([*words, "--actor-id", actor_id], environment))
        self.actors.append(actor)
        return actor

    def gateway(self) -> dict[str, Any]:
        """The gateway's stats, once it is there to give them."""
        return wait_for(lambda: self.workers.stats()[0], STATE_S, "gateway")

    def learner(self) -> dict[str, Any]:
        return wait_for(lambda: self.workers.stats()[1], STATE_S, "learner")

    def learn_on(self, updates: int = 5) -> None:
        """Wait for so many more updates."""
        goal = self.learner()["updates"] + updates
        wait_for(lambda: self.learner()["updates"] >= goal, STATE_S, f"{goal} updates")

    def close(self) -> dict[str, Any]:
        self.workers.finish_learner()
        stats = self.workers.close_gateway()
        return stats["segments"]


def assert_balanced(segments: dict[str, Any]) -> None:
    dropped = sum(segments["dropped"].values())
    assert segments["received"] == segments["consumed"] + segments["queued"] + dropped, segments
    assert segments["balanced"]


FAULTS = [
    Fault("kill", "gateway", "segments", 60),
    Fault("cut", "actor_link", "segments", 90),
    Fault("kill", "learner", "segments", 120),
    Fault("partition", "actor_link", "segments", 150, seconds=1.0),
    Fault("kill", "weights", "versions", 10),
    Fault("kill", "proxy", "versions", 20),
]


def test_a_run_whose_parts_are_killed_and_whose_actors_are_cut_off_keeps_its_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user tries it. A mean return of 200 over 100 episodes takes more than 150 segments."""
    job = ["actor_learner", "--actors", "2", "gateway.shards=2", "target_return=200"]
    job += ["gateway.heartbeat_s=0.2", "gateway.timeout_s=2"]
    campaign = {"run": job, "equal": [], "seed": 0, "faults": [asdict(each) for each in FAULTS]}
    file = tmp_path / "campaign.json"
    file.write_text(json.dumps(campaign))
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    with Program([sys.executable, "-m", "shoal", "chaos", "replay", str(file), "--json"]) as program:
        assert program.wait() == 0
    found = json.loads(next((tmp_path / "home" / "chaos").glob("*.json")).read_text())
    assert {each["fault"]["target"] for each in found["strikes"] if each["victim"]} == {e.target for e in FAULTS}
    assert not found["missed"]
    accounts = shoal.runs.load(found["run_id"]).list_events("accounting")
    assert {name for _, each in accounts for name, num in each["dropped"].items() if num} <= {*ORDINARY, *CRASHES}


@pytest.mark.soak
def test_a_learner_of_two_is_killed_and_another_takes_its_place(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    words = ["learner.replicas=2", "learner.num_cpus=0.25"]
    with Loop(tmp_path / "run", f"faults-{os.getpid()}-replicas", *words) as loop:
        loop.start_actor("actor-0")
        [first] = wait_for(lambda: loop.learner()["replica_pids"], STATE_S, "the other learner")
        loop.learn_on()
        assert loop.learner()["metrics"]["learner/replicas"] == 2.0
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: loop.learner()["replica_pids"] not in ([], [first]), STATE_S, "its replacement")
        loop.learn_on()
        after = loop.learner()
        assert after["restored_updates"] == 0  # the first one lived on
        assert after["metrics"]["learner/replicas"] == 2.0
        segments = loop.close()
    assert_balanced(segments)
    assert segments["queued"] == 0
    assert set(segments["dropped"]) <= {*ORDINARY, "learner_crash"}


@pytest.mark.soak
def test_two_runs_learn_on_one_cluster_at_once(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    words = ["learner.num_cpus=0.25", "algorithm=ppo", "algorithm.synchronous=true"]
    with (
        Loop(tmp_path / "one", f"faults-{os.getpid()}-one", "learner.num_cpus=0.25") as one,
        Loop(tmp_path / "two", f"faults-{os.getpid()}-two", *words) as two,
    ):
        for loop in (one, two):
            loop.start_actor("actor-0")  # the same id: each run has accounts of its own
        for loop in (one, two):
            loop.learn_on()
        assert one.gateway()["address"] != two.gateway()["address"]
        assert one.learner()["pid"] != two.learner()["pid"]
        assert two.learner()["metrics"]["learner/policy_lag"] == 0.0
        for loop in (one, two):
            segments = loop.close()
            assert_balanced(segments)
            assert segments["consumed"] > 0
            assert set(segments["dropped"]) <= set(ORDINARY)
