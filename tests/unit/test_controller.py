"""A controller and replicas that do as they like: they are slow, fail, die, come back; the controller is started again.

The replicas are fakes that keep the contract of `host.ReplicaHost`; the controller, its state file and the
administration are real. After every step nothing may have happened that a rollout must never let happen.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.errors import InferenceError, RegistryError
from shoal.serve.administration import Administration
from shoal.serve.controller import EndpointController
from shoal.serve.controller_state import Deployment, StateFile
from shoal.serve.options import ModelOptions
from shoal.serve.report import Failure, ModelReport, ReplicaReport
from shoal.serve.rollout import EndpointPlan, ModelPlan, Phase

LEASE_S = 5.0
STAGE_TIMEOUT_S = 60.0
VERSIONS = (1, 2, 3, 4)
OPTIONS = ModelOptions().model_dump(mode="json")


class FakeCatalogue:
    """One model with four versions and an alias."""

    def __init__(self) -> None:
        self.stack = [1]
        self.away = False

    def meant(self, name: str, word: str) -> int:
        if self.away:
            raise RegistryError("the registry is gone")
        version = int(word) if word.isdigit() else self.stack[-1]
        if version not in VERSIONS:
            raise RegistryError(f"{name!r} has no {word!r}")
        return version

    def promote(self, name: str, version: int, alias: str) -> None:
        self.meant(name, str(version))
        if self.stack[-1] != version:
            self.stack.append(version)

    def before(self, name: str, alias: str) -> int:
        self.meant(name, alias)
        if len(self.stack) < 2:
            raise RegistryError("was never another version")
        return self.stack[-2]

    def rollback(self, name: str, alias: str) -> None:
        self.before(name, alias)
        self.stack.pop()


@dataclass
class FakeReplica:
    """Does what a plan says, one step at a time. It is asked for answers once it is ready."""

    name: str
    plan: EndpointPlan = field(default_factory=EndpointPlan)
    staged: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    failure: Failure | None = None
    is_ready: bool = False
    stable: int = 0
    candidate: int = 0
    heard_s: float = 0.0  # when the controller last heard of it

    @property
    def wanted(self) -> ModelPlan | None:
        return self.plan.models[0] if self.plan.models else None

    @property
    def answering(self) -> set[int]:
        return {version for version in (self.stable, self.candidate) if version}

    def hear(self, plan: EndpointPlan) -> None:
        self.plan = plan
        self.point()

    def stage_one(self) -> None:
        wanted = self.wanted
        assert wanted is not None
        if self.failure is not None and self.failure.attempt != wanted.attempt:
            self.failure = None
        missing = [version for version in wanted.staged if version not in self.staged]
        missing = [version for version in missing if self.failure is None or self.failure.version != version]
        if missing and missing[0] in self.bad:
            self.failure = Failure(missing[0], wanted.attempt, "the file is gone")
        elif missing:
            self.staged.add(missing[0])
        self.point()

    def point(self) -> None:
        wanted = self.wanted
        assert wanted is not None
        if wanted.stable in self.staged:
            self.stable = wanted.stable
            self.is_ready = True
        self.candidate = wanted.candidate if wanted.candidate in self.staged else 0
        self.staged &= set(wanted.staged)

    def report(self) -> ReplicaReport:
        model = ModelReport(self.stable, tuple(sorted(self.staged)), self.failure)
        return ReplicaReport(self.name, 1, self.plan.generation, self.is_ready, {"m": model})


class Cluster:
    """Three replicas, a controller with its file, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.loop = asyncio.new_event_loop()
        self.catalogue = FakeCatalogue()
        self.file = StateFile(folder / "endpoint.json")
        self.replicas: dict[str, FakeReplica] = {}
        self.num_replicas = 0
        self.asked: list[asyncio.Task[str]] = []
        self.start_controller()

    def start_controller(self) -> None:
        self.controller = EndpointController(
            "endpoint",
            [Deployment("m", "/registry", "champion", OPTIONS)],
            state_file=self.file,
            catalogue=lambda folder: self.catalogue,
            lease_s=LEASE_S,
            stage_timeout_s=STAGE_TIMEOUT_S,
            clock=lambda: self.now_s,
        )
        self.administration = Administration(self.controller, "/registry", {"": OPTIONS})

    def add(self) -> FakeReplica:
        self.num_replicas += 1
        replica = FakeReplica(f"r{self.num_replicas}")
        self.replicas[replica.name] = replica
        self.poll(replica)
        return replica

    def tell(self, replica: FakeReplica) -> None:
        replica.heard_s = self.now_s
        self.controller.report(replica.report())

    def is_waited_for(self, replica: FakeReplica) -> bool:
        """Whether a rollout has to wait for this one: it may be asked, and lives as far as anybody knows."""
        return replica.is_ready and self.now_s - replica.heard_s <= LEASE_S

    def poll(self, replica: FakeReplica) -> None:
        """One long poll that has an answer, or ends without."""
        replica.heard_s = self.now_s
        if replica.plan.generation != self.controller.plan.generation:
            plan = self.loop.run_until_complete(self.controller.follow(replica.name, replica.plan.generation, 0.0))
            assert plan is not None
            replica.hear(plan)

    def ask(self, **change: Any) -> None:
        """What an administrator asks; the answer may come many steps later, or never."""
        self.asked.append(self.loop.create_task(self.administration.administer({"model": "m", **change}, "me")))
        self.spin()

    def spin(self) -> None:
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))
        for task in [task for task in self.asked if task.done()]:
            self.asked.remove(task)
            if not isinstance(task.exception(), InferenceError | None):
                task.result()

    def settle(self) -> None:
        """Everybody does all there is to do."""
        for _ in range(12):
            for replica in self.replicas.values():
                self.poll(replica)
                replica.stage_one()
                self.tell(replica)
            self.controller.tick()
            self.spin()

    def close(self) -> None:
        for task in self.asked:
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    @property
    def rollout(self) -> Any:
        return self.controller.state.models["m"].rollout


class RolloutMachine(RuleBasedStateMachine):
    """See the module's docstring. `_flipped` is what the clients were last promised."""

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.CRITICAL)
        self._folder = tempfile.TemporaryDirectory()
        self.cluster = Cluster(Path(self._folder.name))
        self._stable = 0
        self._events: list[Any] = []

    def teardown(self) -> None:
        self.cluster.close()
        self._folder.cleanup()
        logging.disable(logging.NOTSET)

    @initialize(num=st.integers(1, 3))
    def deployed(self, num: int) -> None:
        for _ in range(num):
            self.cluster.add()
        self.cluster.settle()
        assert self.cluster.rollout.stable == 1

    def one(self, index: int) -> FakeReplica:
        replicas = list(self.cluster.replicas.values())
        return replicas[index % len(replicas)]

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.cluster.replicas)
    def polls(self, index: int) -> None:
        self.cluster.poll(self.one(index))

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.cluster.replicas)
    def stages(self, index: int) -> None:
        self.one(index).stage_one()

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.cluster.replicas)
    def reports(self, index: int) -> None:
        self.cluster.tell(self.one(index))
        self.cluster.spin()

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.cluster.replicas)
    def dies(self, index: int) -> None:
        del self.cluster.replicas[self.one(index).name]

    @rule(index=st.integers(0, 5))
    @precondition(lambda self: self.cluster.replicas)
    def is_stopped(self, index: int) -> None:
        name = self.one(index).name
        del self.cluster.replicas[name]
        self.cluster.controller.leave(name)

    @rule()
    @precondition(lambda self: len(self.cluster.replicas) < 4)
    def another_comes(self) -> None:
        self.cluster.add()

    @rule(index=st.integers(0, 5), version=st.sampled_from(VERSIONS[1:]))
    @precondition(lambda self: self.cluster.replicas)
    def loses_a_file(self, index: int, version: int) -> None:
        self.one(index).bad.add(version)

    @rule()
    def everybody_is_mended(self) -> None:
        for replica in self.cluster.replicas.values():
            replica.bad.clear()
        self.cluster.catalogue.away = False

    @rule(seconds=st.sampled_from([0.1, 2.0, LEASE_S + 1.0]), heard=st.booleans())
    def time_passes(self, seconds: float, heard: bool) -> None:
        self.cluster.now_s += seconds
        for replica in self.cluster.replicas.values():  # whoever lives is heard of within the lease
            if heard or seconds > LEASE_S:
                self.cluster.tell(replica)
        self.cluster.controller.tick()
        self.cluster.spin()

    @rule()
    def the_controller_is_started_again(self) -> None:
        for task in self.cluster.asked:
            task.cancel()
        self.cluster.loop.run_until_complete(asyncio.sleep(0))
        self.cluster.asked.clear()
        before = self.cluster.rollout
        self.cluster.start_controller()
        after = self.cluster.rollout
        assert (after.stable, after.candidate) == (before.stable, before.candidate) or after.by == "registry"

    @rule(version=st.sampled_from(VERSIONS), action=st.sampled_from(["deploy", "promote"]))
    def another_version_is_asked_for(self, version: int, action: str) -> None:
        self.cluster.ask(action=action, version=version)

    @rule(version=st.sampled_from(VERSIONS), percent=st.sampled_from([0, 10, 100]), shadow=st.booleans())
    def a_candidate_is_asked_for(self, version: int, percent: int, shadow: bool) -> None:
        self.cluster.ask(action="shadow" if shadow else "canary", version=version, percent=percent)

    @rule()
    def the_candidate_is_promoted(self) -> None:
        self.cluster.ask(action="promote")

    @rule()
    def it_is_rolled_back(self) -> None:
        self.cluster.ask(action="rollback")

    @rule(version=st.sampled_from(VERSIONS))
    def the_alias_is_moved(self, version: int) -> None:
        if not self.cluster.catalogue.away:
            self.cluster.catalogue.promote("m", version, "champion")

    @rule()
    def the_registry_goes_away(self) -> None:
        self.cluster.catalogue.away = True

    @rule()
    def everybody_does_what_there_is_to_do(self) -> None:
        self.cluster.settle()
        rollout = self.cluster.rollout
        if self.cluster.replicas and not any(replica.bad for replica in self.cluster.replicas.values()):
            self.cluster.now_s += LEASE_S + 1.0  # who died is no longer waited for
            self.cluster.settle()
            assert self.cluster.rollout.phase in (Phase.STEADY, Phase.CANARY), rollout

    @invariant()
    def a_version_answers_on_all_replicas_or_on_none(self) -> None:
        """Before a replica is told that a version answers, every replica that may be asked has it loaded."""
        for told in self.cluster.controller.plan.models:
            for replica in self.cluster.replicas.values():
                if told.stable and self.cluster.is_waited_for(replica):
                    assert told.stable in replica.staged, (told, replica)

    @invariant()
    def nobody_gets_a_version_that_was_not_announced(self) -> None:
        rollout = self.cluster.rollout
        announced = {rollout.stable, rollout.candidate, rollout.refused}
        for replica in self.cluster.replicas.values():
            heard = replica.plan.generation == self.cluster.controller.plan.generation
            if not replica.is_ready:
                assert not replica.answering
            elif heard and rollout.phase in (Phase.STEADY, Phase.STAGING):
                assert replica.answering == {rollout.stable}
            elif self.cluster.is_waited_for(replica) and rollout.refused == 0:
                assert replica.answering <= announced, (rollout, replica)

    @invariant()
    def after_the_flip_there_is_one_version(self) -> None:
        """Settled means settled: everybody who was waited for answers with the stable version alone."""
        rollout = self.cluster.rollout
        if rollout.phase is Phase.STEADY and not rollout.refused:
            for replica in self.cluster.replicas.values():
                if self.cluster.is_waited_for(replica):
                    assert replica.answering == {rollout.stable}, (rollout, replica)

    @invariant()
    def every_change_is_told_once(self) -> None:
        events = self.cluster.controller.state.events
        assert [event.number for event in events] == list(range(len(events)))
        assert events[: len(self._events)] == self._events
        new = events[len(self._events) :]
        self._events = list(events)
        rollout = self.cluster.rollout
        stable = rollout.candidate if rollout.phase is Phase.FLIPPING else rollout.stable
        if stable != self._stable:
            assert any(event.version == stable and event.kind != "abandon" for event in new), new
            self._stable = stable


TestRollouts = RolloutMachine.TestCase
TestRollouts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    made = Cluster(tmp_path)
    for _ in range(3):
        made.add()
    made.settle()
    yield made
    made.close()


def steps(cluster: Cluster) -> list[str]:
    return [event.kind for event in cluster.controller.state.events]


@pytest.mark.parametrize("restart_before", range(8))
def test_a_controller_that_is_started_again_goes_on_at_every_step(cluster: Cluster, restart_before: int) -> None:
    """From staging to the flip on the last replica; whichever life it is in, the end is the same."""
    replicas = list(cluster.replicas.values())

    def all_do(*what: str) -> None:
        for each in replicas:
            for name in what:
                {"poll": cluster.poll, "stage": FakeReplica.stage_one, "report": cluster.tell}[name](each)

    script = [
        lambda: cluster.ask(action="deploy", version=2),
        lambda: all_do("poll"),
        lambda: all_do("stage"),
        lambda: cluster.tell(replicas[0]),
        lambda: all_do("report"),
        lambda: all_do("poll"),
        lambda: all_do("report"),
        lambda: None,
    ]
    for number, step in enumerate(script):
        if number == restart_before:
            cluster.start_controller()
        step()
    cluster.settle()
    assert (cluster.rollout.phase, cluster.rollout.stable) == (Phase.STEADY, 2)
    assert {replica.stable for replica in replicas} == {2}
    assert steps(cluster) == ["deploy", "deploy"]


def test_a_state_file_of_another_deployment_or_a_damaged_one_is_not_gone_on_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = StateFile(tmp_path / "endpoint.json")
    EndpointController("endpoint", [Deployment("a", "", "", OPTIONS)], deployment_id="1", state_file=file)
    again = EndpointController("endpoint", [Deployment("b", "", "", OPTIONS)], deployment_id="1", state_file=file)
    other = EndpointController("endpoint", [Deployment("b", "", "", OPTIONS)], deployment_id="2", state_file=file)
    assert [list(each.state.models) for each in (again, other)] == [["a"], ["b"]]
    (tmp_path / "endpoint.json").write_text("{")
    damaged = EndpointController("endpoint", [Deployment("c", "", "", OPTIONS)], deployment_id="2", state_file=file)
    assert list(damaged.state.models) == ["c"]
    assert "cannot be read" in caplog.text


def test_a_lost_state_file_does_not_let_replicas_believe_that_they_know_the_plan(cluster: Cluster) -> None:
    cluster.ask(action="canary", version=2, percent=10)
    cluster.settle()
    known = cluster.controller.plan.generation
    cluster.file.remove()
    cluster.start_controller()
    for replica in cluster.replicas.values():
        cluster.tell(replica)
    assert cluster.controller.plan.generation > known
    assert cluster.rollout.phase is Phase.FLIPPING  # of the first version, again: nobody has heard of it
    cluster.settle()
    assert {replica.candidate for replica in cluster.replicas.values()} == {0}


def test_many_replicas_that_die_with_a_candidate_roll_it_back(cluster: Cluster) -> None:
    cluster.ask(action="canary", version=2, percent=10)
    cluster.settle()
    assert cluster.rollout.phase is Phase.CANARY
    for name in list(cluster.replicas):
        del cluster.replicas[name]
        cluster.add()
        cluster.settle()
        cluster.now_s += LEASE_S + 1.0
        for replica in cluster.replicas.values():
            cluster.tell(replica)
        cluster.controller.tick()
    cluster.settle()
    assert cluster.rollout.phase is Phase.STEADY
    assert "replicas died" in cluster.rollout.reason


def test_a_promotion_waits_for_replicas_that_came_after_the_canary_was_opened(cluster: Cluster) -> None:
    cluster.ask(action="canary", version=2, percent=10)
    cluster.settle()
    late = cluster.add()
    late.stage_one()
    cluster.tell(late)
    assert (late.is_ready, late.staged) == (True, {1})
    cluster.ask(action="promote")
    cluster.catalogue.promote("m", 2, "champion")  # nor does the alias go ahead
    cluster.controller.tick()
    assert cluster.rollout.phase is Phase.CANARY
    cluster.settle()
    assert (cluster.rollout.phase, cluster.rollout.stable) == (Phase.STEADY, 2)


def test_a_canary_that_a_later_replica_cannot_have_is_rolled_back(cluster: Cluster) -> None:
    cluster.ask(action="canary", version=2, percent=10)
    cluster.settle()
    cluster.add().bad.add(2)
    cluster.settle()
    assert (cluster.rollout.phase, cluster.rollout.stable) == (Phase.STEADY, 1)
    assert "cannot stage version 2: the file is gone" in cluster.rollout.reason


def test_a_promotion_whose_alias_cannot_be_moved_does_not_happen(cluster: Cluster) -> None:
    cluster.ask(action="canary", version=2, percent=10)
    cluster.settle()
    cluster.catalogue.away = True
    with pytest.raises(InferenceError, match="cannot be moved"):
        cluster.loop.run_until_complete(
            cluster.administration.administer({"action": "promote", "model": "m", "timeout_s": 1.0}, "me")
        )
    assert (cluster.rollout.phase, cluster.rollout.stable) == (Phase.CANARY, 1)


def test_closed_it_wakes_who_waits(cluster: Cluster) -> None:
    async def body() -> None:
        waiting = asyncio.create_task(cluster.controller.follow("r1", cluster.controller.plan.generation, 60.0))
        await asyncio.sleep(0)
        cluster.controller.close(forget=True)
        cluster.controller.close()
        assert await waiting is None

    cluster.loop.run_until_complete(body())
    assert cluster.file.load("") is None
