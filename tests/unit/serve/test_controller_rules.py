"""A controller and replicas that do as they like: they are slow, fail, die, come back; the controller is started again.

After every step nothing may have happened that a rollout must never let happen.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.serve.controller.rollout import Phase
from unit.serve.controller_setting import LEASE_S, VERSIONS, Cluster, FakeReplica


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
                # Two rollbacks at once drop the candidate and flip: who has heard of neither answers as it was told.
                told = {version for each in replica.plan.models for version in (each.stable, each.candidate)}
                assert replica.answering <= announced | told, (rollout, replica)

    @invariant()
    def after_the_flip_there_is_one_version(self) -> None:
        """Settled means settled: everybody who was waited for answers with the stable version alone.

        A rollout that was given up, which leaves its reason, is waited for by nobody.
        """
        rollout = self.cluster.rollout
        if rollout.phase is Phase.STEADY and not rollout.reason:
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
TestRollouts.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
