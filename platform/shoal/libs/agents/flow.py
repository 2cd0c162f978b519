"""A run of agents, from its command to its record and its registered version.

    gateway and learner up ► sessions announced ► drivers ► steps ► target, limit or time ► registered

Called by jobs/agents.py, in a process connected to a Ray cluster. The gateway's process samples; the learner's learns.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import SecretStr

import shoal.runs
from shoal.client.discovery import INFERENCE_KIND
from shoal.errors import NotReached, RecordUnwritable, RunError
from shoal.extend.cluster import Program, end_programs, start_program
from shoal.extend.flows import recorded_run
from shoal.extend.registry import Registry
from shoal.extend.rl import ActorLearnerWorkers
from shoal.extend.runs import RunRecorder, Status, print_line
from shoal.extend.serve import EndpointModel, EndpointSpec, LiveModel, ModelOptions, TextOptions
from shoal.home import load_access_token
from shoal.libs.agents.metrics import AgentsMetrics
from shoal.libs.agents.model import AgentsModel, describe, register
from shoal.libs.agents.setting import check, make_setting
from shoal.libs.agents.spec import AgentsSpec

JOB = "agents"
POLL_S = 0.5
PRINT_S = 2.0
FINISH_S = 30.0
DRIVER_LOG = "driver.log"  # in the run's folder


def run_agents(spec: AgentsSpec, job: str) -> str:
    """Run until the target, the limit of steps or the end of its time; returns its id. Raises NotReached."""
    check(spec)
    if "@" in spec.model and not Path(spec.model).exists():  # an alias may move meanwhile
        spec = spec.update({"model": Registry().get(spec.model).ref})
    with recorded_run(spec, job, JOB, "gateway_ready") as recorder:
        with ExitStack() as closing:
            run = AgentsRun(spec, recorder, closing)
            run.learn()
            run.finish()
        if run.missed:
            recorder.finish(Status.NOT_REACHED, run.missed)
    if run.missed:
        raise NotReached(run.missed)
    return recorder.id


class AgentsRun:
    """One run: its workers, its own driver, and what it has logged."""

    def __init__(self, spec: AgentsSpec, recorder: RunRecorder, closing: ExitStack) -> None:
        self.spec = spec
        self.recorder = recorder
        self.missed = ""
        token = load_access_token()
        setting = make_setting(spec, recorder.folder, token, recorder.id)
        setting.site.prepare()
        has_learnt = bool(spec.resume) and shoal.runs.load(spec.resume).num_versions() > 0
        self._workers = ActorLearnerWorkers(spec.make_rl_spec(), setting, has_learnt)
        closing.callback(self._workers.close)
        self._workers.wait_for_gateway()
        if spec.replicas:
            self._deploy(token, closing)
        self._gateway, self._learner = dict[str, Any](), dict[str, Any]()
        self._driver: Program | None = None
        self._metrics = AgentsMetrics()
        self._next_event = 1
        self._poll()
        self.url: str = self._gateway["sessions"]["url"]
        recorder.record_event("gateway_ready", address=self.url)
        recorder.record_endpoint("sessions", "sessions", self.url, "ready")
        print_line(f"run {recorder.id}: sessions are opened at {self.url}/shoal/v1/sessions")
        if spec.agents:
            self._start_driver(token, closing)

    @cached_property
    def _model(self) -> AgentsModel:
        return describe(self.spec.text_algorithm)

    def _deploy(self, token: str, closing: ExitStack) -> None:
        """Start the replicas that sample, and name them to the gateway."""
        from shoal.extend.serve import deploy  # Serve takes a second to load

        spec = self.spec
        name = spec.model_name
        own = {name: getattr(spec, name) for name in ("slots", "length", "engine", "engine_python", "engine_args")}
        text = TextOptions(tokenizer=spec.model, **own)
        endpoint = EndpointSpec(
            name=name,
            num_replicas=spec.replicas,
            token=SecretStr(token),
            model=ModelOptions(text=text),
            **spec.replica.model_dump(),
        )
        model = LiveModel(self._model.factory, self._model.signature, self._workers.make_weight_source())
        deployed = deploy(endpoint, [EndpointModel(name, model)], self.recorder.record_event)
        closing.callback(deployed.close)
        self._workers.connect_front(deployed.url)
        self.recorder.record_endpoint(name, INFERENCE_KIND, deployed.url, "ready")

    def _start_driver(self, token: str, closing: ExitStack) -> None:
        spec = self.spec
        group_size = spec.text_algorithm.group_size
        command = [sys.executable, "-m", "shoal.libs.agents.driver", self.url, "--env", spec.env]
        seed = (
            spec.learner.seed + self._learner["updates"] * spec.text_algorithm.groups_per_step
        )  # those of a resumed run
        command += ["--agents", str(spec.agents), "--group-size", str(group_size), "--seed", str(seed)]
        command += ["--agent", spec.agent] if spec.agent else []
        environment = {**os.environ, "SHOAL_TOKEN": token}
        self._driver = start_program([*command, "--lifeline"], self.recorder.folder / DRIVER_LOG, environment)
        closing.callback(end_programs, [self._driver], FINISH_S)

    def _require_driver(self) -> None:
        """Raises RunError where the run's own driver has ended."""
        if self._driver is not None and self._driver.poll() is not None:
            path = self.recorder.folder / DRIVER_LOG
            last = next(iter(path.read_text(errors="replace").strip().splitlines()[-1:]), "")
            raise RunError(f"the run's driver has ended with {self._driver.returncode} ({path}): {last}")

    def learn(self) -> None:
        """Follow the run until it is over."""
        spec = self.spec
        started_s: float | None = None
        printed_s = 0.0
        while True:
            self._poll()
            self._require_driver()
            sessions = self._gateway["sessions"]
            if started_s is None and sessions.get("opened"):
                started_s = time.monotonic()
            self._log()
            if time.monotonic() - printed_s >= PRINT_S:
                printed_s = time.monotonic()
                reward = "-" if sessions["reward"] is None else f"{sessions['reward']:.3f}"
                print_line(f"step {self._learner['updates']:,} | reward {reward} | {sessions['open']} sessions open")
            is_full = sessions.get("ended", 0) >= sessions["window"]
            if spec.target_reward is not None and is_full and (sessions["reward"] or 0.0) >= spec.target_reward:
                return
            if spec.max_steps is not None and self._learner["updates"] >= spec.max_steps:
                break
            if started_s is not None and time.monotonic() - started_s > spec.max_wall_s:
                break
            time.sleep(POLL_S)
        if spec.target_reward is not None:
            self.missed = f"the mean reward is {self._gateway['sessions']['reward']}, of {spec.target_reward:g}"

    def finish(self) -> None:
        """Register the newest weights."""
        snapshot = self._workers.pause_learner()
        self._poll()
        version = register(self._model, self.spec.model_name, snapshot)
        print_line(f"registered {version.ref}")
        self._workers.finish_learner(FINISH_S)
        self._workers.close_gateway()
        self.recorder.record_endpoint("sessions", "sessions", self.url, "closed")

    def _poll(self) -> None:
        gateway, learner = self._workers.stats()
        self._gateway, self._learner = gateway or self._gateway, learner or self._learner
        for published in self._workers.take_published():
            with suppress(RecordUnwritable):
                self.recorder.record_weights(*published)

    def _log(self) -> None:
        step = self._learner["updates"]
        with suppress(RecordUnwritable):
            self.recorder.log(step, self._metrics.compute(self._gateway, self._learner))
            if step >= self._next_event:  # consoles draw answers of new versions
                self._next_event = 2 * step
                self.recorder.record_event("learning", step=step, reward=self._gateway["sessions"]["reward"])
