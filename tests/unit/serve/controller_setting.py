"""A controller with its file, a catalogue of one model, replicas that do as they like, and a clock; for its tests.

The replicas are fakes that keep the contract of `host.ModelManager`; the controller, its state file and the
administration are real.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InferenceError, RegistryError
from shoal.registry.manifest import Signature
from shoal.serve.controller.admin_api import AdminApi
from shoal.serve.controller.controller import EndpointController
from shoal.serve.controller.rollout import Phase
from shoal.serve.controller.state import Deployment, StateFile
from shoal.serve.messages.counts import ModelCounts
from shoal.serve.messages.desired_state import EndpointPlan, ModelPlan
from shoal.serve.messages.replica_report import ModelReport, RejectedVersion, ReplicaReport
from shoal.serve.spec.model_options import ModelOptions

LEASE_S = 5.0
STAGE_TIMEOUT_S = 60.0
VERSIONS = (1, 2, 3, 4)
OPTIONS = ModelOptions().model_dump(mode="json")


class FakeCatalogue:
    """One model with four versions and an alias."""

    def __init__(self) -> None:
        self.stack = [1]
        self.newest = 1
        self.away = False

    def resolve(self, name: str, word: str) -> int:
        if self.away:
            raise RegistryError("the registry is gone")
        version = int(word) if word.isdigit() else self.newest if word == "latest" else self.stack[-1]
        if version not in VERSIONS:
            raise RegistryError(f"{name!r} has no {word!r}")
        return version

    def follow(self, name: str, selector: str) -> int:
        return self.resolve(name, selector)

    def describe(self, name: str, version: int) -> tuple[Signature, int]:
        self.resolve(name, str(version))
        return Signature(inputs=[], outputs=[]), 100

    def promote(self, name: str, version: int, alias: str) -> None:
        self.resolve(name, str(version))
        if self.stack[-1] != version:
            self.stack.append(version)

    def find_previous(self, name: str, alias: str, without: Collection[int]) -> int:
        self.resolve(name, alias)
        before = [version for version in self.stack[:-1] if version not in without]
        if not before:
            raise RegistryError("was never another version")
        return before[-1]

    def rollback(self, name: str, alias: str, without: Collection[int] = ()) -> None:
        version = self.find_previous(name, alias, without)
        while self.stack[-1] != version:
            self.stack.pop()


@dataclass
class FakeReplica:
    """Does what a plan says, one step at a time. It is asked for answers once it is ready."""

    name: str
    plan: EndpointPlan = field(default_factory=EndpointPlan)
    staged: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    rejected: RejectedVersion | None = None
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
        if self.rejected is not None and self.rejected.attempt != wanted.attempt:
            self.rejected = None
        missing = [version for version in wanted.staged if version not in self.staged]
        missing = [version for version in missing if self.rejected is None or self.rejected.version != version]
        if missing and missing[0] in self.bad:
            self.rejected = RejectedVersion(missing[0], "the file is gone", wanted.attempt)
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
        rejected = () if self.rejected is None else (self.rejected,)
        model = ModelReport(self.stable, self.candidate, tuple(sorted(self.staged)), rejected)
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
        self.administration = AdminApi(self.controller, "/registry", lambda name: ModelOptions())

    def add(self) -> FakeReplica:
        self.num_replicas += 1
        replica = FakeReplica(f"r{self.num_replicas}")
        self.replicas[replica.name] = replica
        self.poll(replica)
        return replica

    def tell(self, replica: FakeReplica, counts: ModelCounts | None = None) -> None:
        replica.heard_s = self.now_s
        heard = replica.report()
        self.controller.report(replace(heard, models={"m": replace(heard.models["m"], counts=counts)}))

    def tell_all(self) -> None:
        for replica in self.replicas.values():
            self.tell(replica)

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

    def ask(self, action: str, **change: Any) -> None:
        """What an administrator asks; the answer may come many steps later, or never."""
        self.asked.append(
            self.loop.create_task(self.administration.administer({"action": action, "model": "m", **change}, "me"))
        )
        self.spin()

    def change(self, action: str, **change: Any) -> int:
        """What an administrator asks, and all there is to do for it; the version that is stable then."""
        self.ask(action, **change)
        self.settle()
        return int(self.rollout.stable)

    def open_canary(self, version: int) -> None:
        self.change("canary", version=version, percent=10)

    def redeploy(self, version: str, options: Mapping[str, Any] = OPTIONS, **more: bool) -> None:
        self.controller.redeploy(Deployment("m", "/registry", version, dict(options)), **more)

    def spoil(self, *versions: int) -> None:
        """No replica can stage these, and each can stage all others."""
        for replica in self.replicas.values():
            replica.bad = set(versions)

    def refusal(self, action: str, **change: Any) -> InferenceError:
        """What an administrator is told who asks for what is refused at once."""
        with pytest.raises(InferenceError) as caught:
            self.loop.run_until_complete(
                self.administration.administer({"action": action, "model": "m", **change}, "me")
            )
        return caught.value

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

    @property
    def position(self) -> tuple[Phase, int]:
        """The phase, and the stable version."""
        return self.rollout.phase, self.rollout.stable
