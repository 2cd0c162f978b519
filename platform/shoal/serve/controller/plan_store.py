"""The desired state of an endpoint: its models and their rollouts, saved in a file, then published as a plan.

Shared by the controller and its parts, which change it here. Every change is on disk before a replica receives it.

| capacity          | what blocks                           | who unblocks                  | close()         |
|-------------------|---------------------------------------|-------------------------------|-----------------|
| MAX_EVENTS events | `wait_for_plan`, up to its timeout    | a new plan                    | wakes all       |
| (the oldest go)   | `wait_until`, up to its timeout       | reports, ticks, changes       |                 |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from shoal.serve.controller.canary_guard import EvidenceCollector
from shoal.serve.controller.rollout import FOLLOWING, Phase, Rollout, build_model_plan
from shoal.serve.controller.state import MAX_EVENTS, ControllerState, Deployment, Event, ModelState, StateFile
from shoal.serve.messages.desired_state import EndpointPlan, ModelPlan
from shoal.serve.messages.model_errors import unknown_model
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport
from shoal.serve.spec.model_source import RegistryCatalogue


class PlanPart(Protocol):
    """What completes the plans of the models that it knows more about."""

    def complete(self, plan: ModelPlan, model: ModelState) -> ModelPlan: ...


@dataclass
class PhaseRecord:
    """When a model entered its phase, as far as this process knows, and what is known of its open candidate."""

    since_s: float
    evidence: EvidenceCollector | None = None


class PlanStore:
    """`state` with what this process alone knows: the replicas' `reports`, the `phases` of rollouts, and `plan`, the
    desired state as the replicas receive it. For one event loop; only the `wait_` methods wait.

    parts:       complete the plan; set before the first `commit`
    deployments: the models that the endpoint was deployed with; the state file takes precedence
    catalogue:   opens the registry at a URL or folder, once
    audit:       logs every change
    """

    def __init__(
        self,
        file: StateFile,
        deployment_id: str,
        deployments: Sequence[Deployment],
        catalogue: Callable[[str], RegistryCatalogue],
        clock: Callable[[], float],
        audit: Callable[[Event], None],
    ) -> None:
        self.file = file
        self.catalogue = cache(catalogue)
        self.clock = clock
        self._audit = audit
        self.reports: dict[str, ReplicaReport] = {}
        self.phases: dict[str, PhaseRecord] = {}
        self.plan = EndpointPlan()
        self.certificate_expires_at = 0.0  # of the ingress, for the replicas' metrics
        self.has_peers = False  # whether replicas call each other
        self.parts: Sequence[PlanPart] = ()
        self._plan_changed = asyncio.Event()  # wakes each replica: with every report would be too often
        self._changed = asyncio.Event()
        self._closed = False
        saved = file.load(deployment_id)
        self.state = saved or ControllerState(deployment=deployment_id, started_at=time.time())
        for deployment in deployments if saved is None else ():
            begins = FOLLOWING if deployment.is_live else Rollout()
            self.state.models[deployment.name] = ModelState(deployment, begins)
        for name, model in self.state.models.items():
            self.enter_phase(name, model.rollout)

    def commit(self) -> None:
        """Save the state, then notify the replicas."""
        state, models = self.state, []
        for name, model in state.models.items():
            asked, before = model.deployment, model.before.options if model.before else None
            plan = build_model_plan(name, asked.registry, asked.options, model.rollout, before)
            for part in self.parts:
                plan = part.complete(plan, model)
            models.append(plan)
        # A flip to the version that already answers (an alias returns to it) is a new plan too.
        announced = max((model.rollout.generation for model in state.models.values()), default=0)
        desired = replace(self.plan, models=tuple(models), certificate_expires_at=self.certificate_expires_at)
        if self.has_peers:
            desired = replace(desired, addresses=state.addresses, peer_token=state.peer_token)
        is_new = desired != self.plan or self.plan.generation != max(announced, state.generation)
        if is_new:
            state.generation += 1
            self.plan = replace(desired, generation=state.generation)
        self.file.save(state)
        if is_new:
            self._plan_changed.set()
            self._plan_changed = asyncio.Event()
        self.notify()

    def catch_up_generation(self, generation: int) -> None:
        """Raise the generation past a replica's when the file was lost."""
        if self.state.catch_up_generation(generation):
            self.commit()

    def is_applied_everywhere(self) -> bool:
        """Whether every replica has received the last change."""
        return all(report.generation >= self.plan.generation for report in self.reports.values())

    def get_model(self, name: str) -> ModelState:
        """A model's state. Raises InferenceError (404)."""
        if name not in self.state.models:
            raise unknown_model(name, self.state.models)
        return self.state.models[name]

    def list_reports(self, name: str) -> list[ModelReport]:
        """What the replicas that have the model have reported of it."""
        return [report.models[name] for report in self.reports.values() if name in report.models]

    def set_rollout(self, name: str, rollout: Rollout) -> None:
        model = self.state.models[name]
        has_moved = rollout.phase is not model.rollout.phase
        model.rollout = rollout
        if has_moved:
            self.enter_phase(name, rollout)
        self.commit()

    def enter_phase(self, name: str, rollout: Rollout) -> None:
        """Begin a phase of a rollout: its time and its evidence."""
        phase = self.phases[name] = PhaseRecord(self.clock())
        if rollout.phase is Phase.CANARY:
            phase.evidence = EvidenceCollector(name, rollout.stable, rollout.candidate)
            for report in self.reports.values():
                phase.evidence.add_report(report)

    def record_event(
        self, kind: str, model: str = "", version: int = 0, previous: int = 0, by: str = "", reason: str = ""
    ) -> None:
        """Append a change to the events and the audit log, where no version and the newest of a run have no number."""
        state = self.state
        versions = max(version, 0) or None, max(previous, 0) or None
        event = Event(state.num_events, time.time(), kind, model, *versions, by, reason)
        state.num_events += 1
        state.events = [*state.events[-(MAX_EVENTS - 1) :], event]
        self._audit(event)

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def wait_for_plan(self, known_generation: int, timeout_s: float) -> EndpointPlan | None:
        """The plan once it is another than `known_generation`; None after `timeout_s`."""
        if self.plan.generation == known_generation and not self._closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._plan_changed.wait()
        return self.plan if self.plan.generation != known_generation else None

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition; returns whether it came true in time, before this was closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition() and not self._closed:
                    await self._changed.wait()
        return condition()

    def notify(self) -> None:
        """Let those that wait for a condition see what has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Wake all waiting callers. Idempotent."""
        self._closed = True
        self._plan_changed.set()
        self.notify()
