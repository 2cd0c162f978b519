"""A run of several policies: a gateway and a learner for each, one endpoint for all, actors that play with all.

    endpoint up ► gateways and learners up ► actors join ► targets reached, or time is up ► evaluated ► registered

Each policy is a loop of its own (queue, ledger, weights, checkpoints), in a folder of the run's. An actor connects to
all gateways, and each segment goes to the gateway of the policy whose agent has played it. Called by jobs such as
`jobs/tag.py`, in a process connected to a Ray cluster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import SecretStr

from shoal.atomic_file import make_folder
from shoal.cluster.capacity import count_gpu_slots, gpus_by_host, require_cpus, require_gpus
from shoal.errors import RecordUnwritable, RunError, needs_extra
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.loop_run import LoopRun, record_loop
from shoal.flows.policy_evaluation import EVALUATION_SEED, Evaluation, InferenceConnection, wait_for_version
from shoal.flows.rl_metrics import (
    ActorLearnerMetrics,
    HistorySampler,
    combine_policies,
    describe_rejections,
    select_lags,
    select_rejections,
)
from shoal.flows.rl_policies.check import check_policies
from shoal.flows.rl_policies.evaluation import evaluate_policies
from shoal.flows.rl_policies.spec import PoliciesSpec
from shoal.flows.rl_policy import describe_policy_model, register_policy
from shoal.flows.serving import record_changes
from shoal.home import load_access_token
from shoal.rl.gateway.opponent_pool import OpponentPool
from shoal.rl.gateway.zmq_listener import load_curve_keys
from shoal.rl.ray_workers import ActorLearnerWorkers, RunSetting
from shoal.runs import RunRecorder
from shoal.runs.formatting import format_number
from shoal.serve.on_ray.ownership import require_free_name
from shoal.serve.spec.model_source import EndpointModel, LiveModel
from shoal.weights import WeightSnapshot
from shoal.wire import ExperienceSpec
from shoal.wire.action_masks import find_choices

if TYPE_CHECKING:
    from shoal.serve.on_ray.deployment import DeployedEndpoint

POLL_S = 0.5
FINISH_S = 5.0  # for the learners to save when the run is stopped
SHUTDOWN_TIMEOUT_S = 10.0
PRINT_S = 2.0


def run_policies(spec: PoliciesSpec, job: str) -> str:
    """Run to the end and return the run's id. Raises RunError when a target was not reached."""
    checked = check_policies(spec)
    return record_loop(spec, job, lambda recorder: _PoliciesRun(spec, recorder, checked))


class _Policy:
    """One policy of the run: its loop's workers, and their newest counts."""

    def __init__(self, name: str, spec: ActorLearnerSpec, experience: ExperienceSpec, observation: np.ndarray) -> None:
        self.name, self.spec, self.experience, self.first_observation = name, spec, experience, observation
        self.workers: ActorLearnerWorkers | None = None
        self.gateway: dict[str, Any] = {}
        self.learner: dict[str, Any] = {}
        self.address = ""
        self.solved_s: float | None = None  # at which it reached its target, though its gateway may restart
        self._checkpoint_failure = ""
        self._pids: dict[str, int] = {}
        self._metrics = ActorLearnerMetrics()

    @property
    def running(self) -> ActorLearnerWorkers:
        assert self.workers is not None
        return self.workers

    @property
    def mean_return(self) -> float:
        return float(self.gateway.get("mean_return", math.nan))

    @property
    def is_solved(self) -> bool:
        """Whether it has reached its target; one without any has not to."""
        return self.spec.target_return is None or self.solved_s is not None

    @property
    def has_experience(self) -> bool:
        """Whether a connected actor has sent any, good or bad."""
        return any(actor["steps"] or actor["invalid"] for actor in self.gateway.get("actors", []))

    def poll(self) -> list[tuple[str, dict[str, Any]]]:
        """Take the newest counts; returns what has happened. Raises RunError when the learner has failed."""
        gateway, learner = self.running.stats()
        self.gateway, self.learner = gateway or self.gateway, learner or self.learner
        self.solved_s = self.solved_s if self.solved_s is not None else self.gateway.get("solved_s")
        if self.learner.get("failure"):
            raise RunError(f"the learner of {self.name} failed: {self.learner['failure']}")
        happened = [(kind, {"at": at, **details}) for at, kind, details in self.running.take_events()]
        failure = self.learner.get("checkpoint_failure", "")
        if failure and failure != self._checkpoint_failure:
            happened.append(("checkpoint_failed", {"step": self.learner["steps"], "error": failure}))
        self._checkpoint_failure = failure
        for part, stats in (("gateway", gateway), ("learner", learner)):
            if stats and self._pids.setdefault(part, stats["pid"]) != stats["pid"]:
                self._pids[part] = stats["pid"]
                happened.append((f"{part}_restarted", {"pid": stats["pid"]}))
        return happened

    def compute_metrics(self) -> dict[str, float]:
        return self._metrics.compute(self.gateway, self.learner, 0.0, time.time())


class _PoliciesRun(LoopRun):
    """A run of several policies."""

    spec: PoliciesSpec

    def __init__(
        self, spec: PoliciesSpec, recorder: RunRecorder, checked: Mapping[str, tuple[ExperienceSpec, np.ndarray]]
    ) -> None:
        super().__init__(spec, recorder)
        self.token = load_access_token()
        self.policies = [_Policy(name, spec.make_policy_spec(name), *each) for name, each in checked.items()]
        self._endpoint: DeployedEndpoint | None = None
        self._learning_since: float | None = None
        self._printed_at, self._sampler = 0.0, HistorySampler(time.monotonic())

    # -- up -------------------------------------------------------------------------------------------------------

    def start(self, closing: ExitStack) -> None:
        spec, recorder = self.spec, self.recorder
        keys = load_curve_keys(recorder.folder) if spec.gateway.curve else None
        require_free_name(spec.model_name)
        num_learners = len(self.policies) * spec.learner.replicas
        num_cpus = num_learners * spec.learner.num_cpus + spec.endpoint.num_replicas * spec.endpoint.num_cpus
        require_cpus(num_cpus, "learner.num_cpus, endpoint.num_cpus or endpoint.num_replicas")
        num_slots = count_gpu_slots(spec.learner.num_gpus, gpus_by_host())
        if spec.learner.device == "cuda":
            require_gpus(spec.learner.num_gpus, num_learners, "learner.num_gpus or learner.replicas")
        elif spec.learner.device == "auto" and num_slots < num_learners:  # one would wait for ever
            for each in self.policies:
                each.spec = each.spec.update({"learner": {"device": "cpu"}})
        served = []
        for each in self.policies:
            folder = recorder.folder / each.name
            make_folder(folder)
            OpponentPool.of_run(each.spec.self_play, folder)  # takes registered opponents out of this registry
            setting = RunSetting(f"{recorder.id}.{each.name}", folder, self.token, each.spec.target_return, keys)
            each.workers = ActorLearnerWorkers(each.spec, each.experience, setting)
            closing.callback(each.workers.close)
            model = LiveModel(
                *describe_policy_model(each.spec, each.experience), each.workers.make_weight_source(), None
            )
            served.append(EndpointModel(each.spec.model_name, model))
        endpoint_spec = spec.endpoint.model_copy(update={"name": spec.model_name, "token": SecretStr(self.token)})
        with needs_extra("serve"):  # Serve takes a second to load: not for `--check`
            from shoal.serve.on_ray.deployment import deploy

        self._endpoint = deploy(endpoint_spec, served, is_shared=True)
        closing.callback(self._endpoint.close)
        names = ", ".join(each.spec.model_name for each in self.policies)
        self._announce_endpoint(self._endpoint, f"NAME, of {names}")
        self._server_key = keys[0].decode() if keys else ""
        for each in self.policies:
            each.address = each.running.wait_for_gateway()
        self._announce_gateway(",".join(each.address for each in self.policies))

    # -- on -------------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Learn until the targets are reached, or for `max_wall_s`. Raises RunError when a target is not reached."""
        while True:
            polled_at = time.monotonic()
            self._poll()
            if self.spec.has_targets and all(each.is_solved for each in self.policies):
                steps = sum(each.gateway["steps"] for each in self.policies)
                self._note("solved", seconds=max(each.solved_s or 0.0 for each in self.policies), steps=steps)
                return
            if self._learning_since is not None and polled_at - self._learning_since > self.spec.max_wall_s:
                self._require_targets()
                self._require_experience()
                return
            time.sleep(max(0.0, POLL_S - (time.monotonic() - polled_at)))

    def _require_targets(self) -> None:
        missed = [
            f"{each.name} {format_number(each.mean_return)} of {each.spec.target_return:g}"
            for each in self.policies
            if not each.is_solved
        ]
        if missed:
            raise RunError(
                f"after {self.spec.max_wall_s:.0f} s the mean return is {', '.join(missed)}: lower"
                f" policies.NAME.target_return, or go on with resume={self.recorder.id} and a longer max_wall_s"
            )

    def _require_experience(self) -> None:
        for each in self.policies:
            if reasons := describe_rejections(each.gateway) if not each.gateway["steps"] else "":
                raise RunError(f"{each.name} has nothing to learn from, for every segment was dropped ({reasons})")

    def _poll(self) -> None:
        assert self._endpoint is not None
        for each in self.policies:
            for kind, details in each.poll():
                self._note(kind, policy=each.name, **details)
        record_changes(self._endpoint, self.recorder)
        found = {each.name: each.gateway["address"] for each in self.policies if each.gateway}
        if any(each.address != found.get(each.name, each.address) for each in self.policies):
            for each in self.policies:  # another process had taken a port
                each.address = found.get(each.name, each.address)
            self._announce_gateway(",".join(each.address for each in self.policies))
        if len(found) < len(self.policies):
            return
        if self._learning_since is None and any(each.has_experience for each in self.policies):
            self._learning_since = time.monotonic()
        if self._learning_since is not None:
            self._log()
            self._print_progress()

    def _log(self) -> None:
        metrics = combine_policies({each.name: each.compute_metrics() for each in self.policies})
        step = int(metrics["steps/total"])
        with suppress(RecordUnwritable):
            self.recorder.log(step, metrics, in_history=self._sampler.should_keep(time.monotonic()))
            self.recorder.log_group(step, "actor_lag", select_lags(self.policies[0].gateway))
            self.recorder.log_group(step, "rejected", select_rejections(*(each.gateway for each in self.policies)))

    def _print_progress(self) -> None:
        if time.monotonic() - self._printed_at < PRINT_S:
            return
        self._printed_at = time.monotonic()
        said = [f"{each.name} {format_number(each.mean_return)}" for each in self.policies]
        steps = sum(each.gateway["steps"] for each in self.policies)
        print(f"returns {', '.join(said)} | {steps:9,} steps", flush=True)

    # -- down -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Evaluate the newest weights of all policies through the endpoint, and register them."""
        snapshots = {each.name: each.running.pause_learner() for each in self.policies}
        for each in self.policies:
            model = register_policy(each.spec, each.experience, snapshots[each.name], self.recorder.id, each.gateway)
            self.recorder.record_model(model.name, model.version, model.aliases)
            print(f"{model.ref} ({', '.join(model.aliases)}) is registered", flush=True)
        played = {name: each for name, each in self._play(snapshots).items() if each.returns}
        last = int(sum(each.gateway["steps"] for each in self.policies)) + 1
        self.recorder.log(last, {f"evaluation/{name}": each.mean_return for name, each in played.items()})
        self.recorder.record_event(
            "policies_evaluated",
            returns={name: each.returns for name, each in played.items()},
            versions={name: sorted(each.versions) for name, each in played.items()},
            seconds=max(each.duration_s for each in played.values()),
        )

    def _play(self, snapshots: Mapping[str, WeightSnapshot]) -> dict[str, Evaluation]:
        assert self._endpoint is not None
        spec = self.spec
        with ExitStack() as opened:
            connections = {}
            for each in self.policies:
                name, size = each.spec.model_name, each.spec.state_size
                connection = InferenceConnection(self._endpoint.url, name, self.token, state_size=size)
                opened.callback(connection.close)
                choices = find_choices(each.experience)
                mask = np.ones(sum(choices), np.bool_) if choices else None
                wait_for_version(connection, each.first_observation, snapshots[each.name].version, mask=mask)
                connections[each.name] = connection
            policy_of = {agent: name for name, policy in spec.policies.items() for agent in policy.agents}
            max_rows = {each.name: spec.endpoint.options(each.spec.model_name).max_rows for each in self.policies}
            episodes, timeout_s = spec.eval_episodes, spec.eval_timeout_s
            return evaluate_policies(
                connections, policy_of, spec.env, episodes, EVALUATION_SEED, max_rows, timeout_s, spec.ignore
            )

    def shut_down(self) -> None:
        """Let the learners save, end the actors' sessions and record the last numbers, however the run ended."""
        started = [each for each in self.policies if each.workers is not None]
        if started and self._endpoint is not None:
            record_changes(self._endpoint, self.recorder)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        with ThreadPoolExecutor(max(len(started), 1)) as threads:  # all at once: they share the time
            list(threads.map(lambda each: each.running.finish_learner(FINISH_S), started))
        for each in started:
            left_s = max(0.0, deadline - time.monotonic())
            stats = each.running.close_gateway(finished=True, timeout_s=left_s)
            if stats is not None:
                self.recorder.record_event("accounting", policy=each.name, **stats["segments"])
        for name, (kind, address) in self._addresses.items():
            self.recorder.record_endpoint(name, kind, address, "closed")
