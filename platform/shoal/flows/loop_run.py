"""What every run of the loop has: its record from beginning to end, and the addresses that it announces.

Called by the flows of one policy and of several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import shoal.runs
from shoal.actor.connection import format_actor_command
from shoal.cluster.job_main import expected_run_id
from shoal.errors import RecordUnwritable
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.serving import list_addresses
from shoal.runs import RunRecorder

if TYPE_CHECKING:
    from shoal.serve.on_ray.deployment import DeployedEndpoint


class LoopRun(ABC):
    """The parts of one run, and its state."""

    spec: ActorLearnerSpec

    def __init__(self, spec: ActorLearnerSpec, recorder: RunRecorder) -> None:
        self.spec, self.recorder = spec, recorder
        self._server_key = ""
        self._addresses: dict[str, tuple[str, str]] = {}  # name -> kind, address

    @abstractmethod
    def start(self, closing: ExitStack) -> None:
        """Start every part; the gateway is announced last, when an endpoint already serves."""

    @abstractmethod
    def learn(self) -> None:
        """Learn until the run has what it is for. Raises RunError when it cannot."""

    @abstractmethod
    def finish(self) -> None:
        """Register what was learnt, and evaluate it through the endpoint."""

    @abstractmethod
    def shut_down(self) -> None:
        """Let learners save, end the actors' sessions and record the last numbers, however the run ended."""

    def _announce_endpoint(self, endpoint: DeployedEndpoint, models: str) -> None:
        for name, (kind, address) in list_addresses(endpoint).items():
            self._record_endpoint(name, kind, address)
        print(f"run {self.recorder.id}: the endpoint is {endpoint.url}/v2/models/{models}", flush=True)

    def _announce_gateway(self, address: str) -> None:
        """`address`: of several policies all of theirs, since an actor needs each."""
        env, key, ignored = self.spec.env, self._server_key, self.spec.ignore
        self._note("gateway_ready", address=address, env=env, server_key=key, ignore=list(ignored))
        self._record_endpoint("gateway", "gateway", address)
        command = format_actor_command(address, env, key, ignored)
        print(f"run {self.recorder.id}: start each actor with\n    {command}", flush=True)

    def _record_endpoint(self, name: str, kind: str, address: str) -> None:
        self._addresses[name] = (kind, address)
        with suppress(RecordUnwritable):
            self.recorder.record_endpoint(name, kind, address, "ready")

    def _note(self, kind: str, **details: Any) -> None:
        """Record an event. The recorder retries failed writes later, so the run goes on."""
        with suppress(RecordUnwritable):
            self.recorder.record_event(kind, **details)


def record_loop(spec: ActorLearnerSpec, job: str, make_run: Callable[[RunRecorder], LoopRun]) -> str:
    """Run it to its end, and return its id. Raises as its `learn` does."""
    # Closes the record first: it must be right even when the rest is cut short.
    record = shoal.runs.recording(
        spec.to_record(),
        job,
        begun="gateway_ready",
        kind=shoal.runs.RunKind.LOOP,
        resumed=spec.resume,
        run_id=expected_run_id(),
    )
    with ExitStack() as closing, record as recorder:
        flow = make_run(recorder)
        try:
            flow.start(closing)
            flow.learn()
            flow.finish()
        finally:
            flow.shut_down()
    shoal.runs.write_report_at_end(recorder.id)
    return recorder.id
