"""The loop: external actors train a policy that an endpoint already serves, and the best version is registered.

    endpoint up ► gateway and learner up ► actors join ► solved ► trial ► registered ► evaluated through the endpoint

A candidate passes a trial before it is registered: the actors' mean return mixes many versions and an exploring policy,
while the trial plays this one version as it will be served. A candidate that fails is not registered; learning goes on.

Called by `jobs/actor_learner.py`, in a process connected to a Ray cluster. It owns the order of events and the run
record; the gateway, the learner and the replicas do the work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import SecretStr

from shoal.cluster.capacity import require_cpus, require_gpus
from shoal.errors import ClusterError, ConnectionLost, InferenceError, RecordUnwritable, RunError, needs_extra
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.loop_run import LoopRun, record_loop
from shoal.flows.policy_evaluation import (
    MAX_MISS_PROBABILITY,
    Evaluation,
    InferenceConnection,
    PolicyConnection,
    estimate_miss,
    evaluate,
    hold_trial,
    wait_for_version,
)
from shoal.flows.rl_metrics import (
    ActorLearnerMetrics,
    HistorySampler,
    describe_rejections,
    select_lags,
    select_rejections,
    select_win_rates,
)
from shoal.flows.rl_policy import check, describe_policy_model, register_policy
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
FINISH_S = 5.0  # for the learner to save when the run is stopped
SHUTDOWN_TIMEOUT_S = 10.0  # for that and for the gateway's bye: Ray kills a job that takes 15 s to stop
PRINT_S = 2.0
NUM_CONNECTIONS = 2  # the endpoint computes for one while this process steps the environments of the other


def run_actor_learner(spec: ActorLearnerSpec, job: str) -> str:
    """Run the loop to its end and return the run's id. Raises RunError when the target was not reached."""
    experience, first_observation = check(spec)
    return record_loop(spec, job, lambda recorder: _ActorLearnerRun(spec, recorder, experience, first_observation))


class _ActorLearnerRun(LoopRun):
    """A run of one policy."""

    def __init__(
        self,
        spec: ActorLearnerSpec,
        recorder: RunRecorder,
        experience: ExperienceSpec,
        first_observation: np.ndarray,
    ) -> None:
        super().__init__(spec, recorder)
        self.token = load_access_token()
        self.experience, self._first_observation = experience, first_observation
        self._workers: ActorLearnerWorkers | None = None
        self._endpoint: DeployedEndpoint | None = None
        self._gateway_stats: dict[str, Any] = {}
        self._learner_stats: dict[str, Any] = {}
        self._pids: dict[str, int] = {}
        self._replica_pids: set[int] = set()  # of the other learners
        self._metrics, self._history_sampler = ActorLearnerMetrics(), HistorySampler(time.monotonic())
        self._printed_at = 0.0
        self._learning_since: float | None = None  # by time.monotonic(), in this incarnation of the run
        self._solved, self._num_requests = False, 0.0
        self._candidate: WeightSnapshot | None = None  # the version that passed its trial
        self._tried_at = -spec.algorithm.updates_between_trials  # the learner's updates at the last trial
        self._checkpoint_failure, self._failed_trial = "", ""

    # -- up -------------------------------------------------------------------------------------------------------

    def start(self, closing: ExitStack) -> None:
        spec, recorder = self.spec, self.recorder
        keys = load_curve_keys(recorder.folder) if spec.gateway.curve else None
        setting = RunSetting(recorder.id, recorder.folder, self.token, spec.target_return, keys)
        require_free_name(spec.model_name)
        num_cpus = spec.learner.replicas * spec.learner.num_cpus + spec.endpoint.num_replicas * spec.endpoint.num_cpus
        require_cpus(num_cpus, "learner.num_cpus, endpoint.num_cpus or endpoint.num_replicas")
        if spec.learner.device == "cuda":
            require_gpus(spec.learner.num_gpus, spec.learner.replicas, "learner.num_gpus or learner.replicas")
        OpponentPool.of_run(spec.self_play, recorder.folder)  # takes the opponents out of this process's registry
        self._workers = ActorLearnerWorkers(spec, self.experience, setting)
        closing.callback(self._workers.close)
        endpoint_spec = spec.endpoint.model_copy(update={"name": spec.model_name, "token": SecretStr(self.token)})
        policy = LiveModel(
            *describe_policy_model(spec, self.experience),
            self._workers.make_weight_source(),
            self._workers.make_episode_service() if spec.learn_from_endpoint else None,
        )
        with needs_extra("serve"):  # Serve takes a second to load: not for `--check`
            from shoal.serve.on_ray.deployment import deploy

        self._endpoint = deploy(endpoint_spec, [EndpointModel(spec.model_name, policy)], is_shared=True)
        closing.callback(self._endpoint.close)
        self._announce_endpoint(self._endpoint, spec.model_name)
        self._server_key = keys[0].decode() if keys else ""
        self._announce_gateway(self._workers.wait_for_gateway())

    # -- on -------------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Learn until the target is reached and the newest version passes its trial. Raises RunError if it cannot
        be."""
        assert self._workers is not None
        while True:
            self._follow_until_a_trial_is_due()
            snapshot = self._workers.pause_learner()
            if self._passes(snapshot):
                self._candidate = snapshot
                return
            self._tried_at = int(self._learner_stats.get("updates", 0))
            self._workers.resume_learner()

    def _passes(self, snapshot: WeightSnapshot) -> bool:
        """Whether this version, played through the endpoint, will reach the target with near certainty. A failed
        attempt to play counts as no, and is retried later; after the time limit its error is raised (ConnectionLost,
        InferenceError)."""
        try:
            trial = self._play(snapshot, hold_trial)
        except (ConnectionLost, InferenceError) as error:
            if self._time_is_up():
                raise
            return self._was_not_tried(snapshot, str(error))
        if trial.versions != {snapshot.version}:  # a restarted learner has published, or the endpoint rejected this one
            return self._was_not_tried(snapshot, f"versions {sorted(trial.versions)} answered")
        miss = estimate_miss(trial, self.spec)
        passes = miss < MAX_MISS_PROBABILITY
        if not passes:
            self._failed_trial = (
                f"version {snapshot.version} returned {format_number(trial.mean_return)} over {len(trial.returns)}"
                f" episodes of a trial, and would miss {self.spec.target_return:g} in others with a probability of"
                f" {miss:.2g}, where {MAX_MISS_PROBABILITY:g} is allowed"
            )
        found = {"mean_return": trial.mean_return, "episodes": len(trial.returns), "passes": passes}
        bound = {"miss_probability": miss, "allowed": MAX_MISS_PROBABILITY, "target": self.spec.target_return}
        reason = "" if passes else self._failed_trial
        self._note("tried", version=snapshot.version, seconds=trial.duration_s, **found, **bound, reason=reason)
        if not passes:
            print(f"{reason}: learning on", flush=True)
        return passes

    def _was_not_tried(self, snapshot: WeightSnapshot, why: str) -> bool:
        self._note("trial_failed", version=snapshot.version, error=why)
        print(f"version {snapshot.version} could not be tried ({why}): learning on", flush=True)
        return False

    def _trial_is_due(self) -> bool:
        """Whether the actors have reached the target, and the learner has moved on since the last trial."""
        stats = self._gateway_stats
        if self.spec.target_return is None:
            return self._time_is_up()
        if stats.get("solved_s") is None:
            return False
        if not self._solved:
            self._solved = True
            self._note("solved", seconds=stats["solved_s"], steps=stats["solved_steps"])
            print(
                f"solved: mean return {format_number(stats['mean_return'])} over 100 episodes,"
                f" {stats['solved_s']:.1f} s after the first segment, {stats['solved_steps']:,} environment steps",
                flush=True,
            )
        if int(self._learner_stats.get("updates", 0)) < self._tried_at + self.spec.algorithm.updates_between_trials:
            return False
        return float(stats["mean_return"]) >= self.spec.target_return

    def _time_is_up(self) -> bool:
        return self._learning_since is not None and time.monotonic() - self._learning_since > self.spec.max_wall_s

    def _follow_until_a_trial_is_due(self) -> None:
        """Poll, record and print. Raises RunError when the target cannot be reached."""
        while True:
            polled_at = time.monotonic()
            self._poll()
            if self._trial_is_due():
                return
            self._require_reachable_target()
            time.sleep(max(0.0, POLL_S - (time.monotonic() - polled_at)))

    def _require_reachable_target(self) -> None:
        if self._learner_stats.get("failure"):
            raise RunError(f"the learner failed: {self._learner_stats['failure']}")
        if not self._time_is_up():
            return
        stats, waited = self._gateway_stats, f"after {self.spec.max_wall_s:.0f} s"
        if not stats["steps"] and (reasons := describe_rejections(stats)):
            raise RunError(
                f"nothing to learn from {waited}, for every segment was dropped ({reasons}): mend the actors"
            )
        mean = stats["mean_return"]
        found = f"mean return {format_number(mean)}" if math.isfinite(mean) else "no episode has ended"
        tried, more = (f" ({self._failed_trial})", ", raise eval_episodes") if self._failed_trial else ("", "")
        raise RunError(
            f"{found} {waited}, the target is {self.spec.target_return}{tried}: lower target_return{more}, or go on"
            f" with resume={self.recorder.id} and a longer max_wall_s"
        )

    def _poll(self) -> None:
        assert self._workers is not None
        gateway, learner = self._workers.stats()
        self._gateway_stats = gateway or self._gateway_stats
        self._learner_stats = learner or self._learner_stats
        if gateway and self._addresses["gateway"][1] != gateway["address"]:
            self._announce_gateway(gateway["address"])  # another process had taken its port
        actors = self._gateway_stats.get("actors", [])
        if self._learning_since is None and any(actor["steps"] or actor["invalid"] for actor in actors):
            self._learning_since = time.monotonic()
        for name, stats in (("gateway", gateway), ("learner", learner)):
            if stats and self._pids.setdefault(name, stats["pid"]) != stats["pid"]:
                self._pids[name] = stats["pid"]
                damaged = stats.get("damaged_checkpoints", [])
                self._note(f"{name}_restarted", pid=stats["pid"], damaged_checkpoints=damaged)
        self._note_replicas()
        failure = self._learner_stats.get("checkpoint_failure", "")
        if failure and failure != self._checkpoint_failure:
            self._note("checkpoint_failed", step=self._learner_stats["steps"], error=failure)
        self._checkpoint_failure = failure
        for at, kind, details in self._workers.take_events():
            self._note(kind, at=at, **details)
        self._record_published()
        assert self._endpoint is not None
        record_changes(self._endpoint, self.recorder)
        if self._learning_since is not None:
            requests = self._count_endpoint_requests()
            metrics = self._metrics.compute(self._gateway_stats, self._learner_stats, requests, time.time())
            in_history = self._history_sampler.should_keep(time.monotonic())
            step = int(self._gateway_stats["steps"])
            with suppress(RecordUnwritable):
                self.recorder.log(step, metrics, in_history=in_history)
                self.recorder.log_group(step, "actor_lag", select_lags(self._gateway_stats))
                self.recorder.log_group(step, "rejected", select_rejections(self._gateway_stats))
                self.recorder.log_group(step, "win_rate", select_win_rates(self._gateway_stats))
        self._print_progress()

    def _note_replicas(self) -> None:
        """Record which of the other learners have joined, and which are gone."""
        pids = set(self._learner_stats.get("replica_pids", []))
        for kind, changed in (
            ("replica_lost", self._replica_pids - pids),
            ("replica_joined", pids - self._replica_pids),
        ):
            for pid in sorted(changed):
                self._note(kind, pid=pid)
        self._replica_pids = pids

    def _record_published(self) -> None:
        assert self._workers is not None
        for published in self._workers.take_published():
            with suppress(RecordUnwritable):
                self.recorder.record_weights(
                    published.version, published.step, published.sha256, published.published_at
                )

    def _count_endpoint_requests(self) -> float:
        """Requests so far; the last known count while a replica restarts, which must not stop learning."""
        assert self._endpoint is not None
        try:
            self._num_requests = float(sum(replica["requests"] for replica in self._endpoint.stats()))
        except ClusterError as error:
            self._note("endpoint_silent", error=str(error))
        return self._num_requests

    def _print_progress(self) -> None:
        stats = self._gateway_stats
        if self._learning_since is None or time.monotonic() - self._printed_at < PRINT_S:
            return
        self._printed_at = time.monotonic()
        mean = format_number(stats["mean_return"]) if math.isfinite(stats["mean_return"]) else "-"
        print(
            f"return {mean:>6} | {stats['steps']:9,} steps | {stats['episodes']:6,} episodes"
            f" | weights {stats['weights_version']:5} | queue {stats['queue_depth']:3}"
            f" | dropped {sum(stats['segments']['dropped'].values()):,}",
            flush=True,
        )

    # -- down -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Register the weights that passed their trial, and evaluate them through the endpoint."""
        assert self._candidate is not None
        model = register_policy(self.spec, self.experience, self._candidate, self.recorder.id, self._gateway_stats)
        self.recorder.record_model(model.name, model.version, model.aliases)
        evaluation = self._play(self._candidate, evaluate)
        self.recorder.log(
            int(self._gateway_stats["steps"]) + 1,
            {
                "evaluation/mean": evaluation.mean_return,
                "evaluation/requests": evaluation.num_requests,
                "endpoint/requests_per_s": evaluation.num_requests / evaluation.duration_s,
            },
        )
        self.recorder.record_event(
            "evaluated",
            mean_return=evaluation.mean_return,
            returns=evaluation.returns,
            requests=evaluation.num_requests,
            versions=sorted(evaluation.versions),
        )
        print(
            f"{model.ref} ({', '.join(model.aliases)}): mean return {evaluation.mean_return:.1f} over"
            f" {len(evaluation.returns)} episodes played through the endpoint ({evaluation.num_requests} requests)",
            flush=True,
        )

    def shut_down(self) -> None:
        """Let the learner save, end the actors' sessions and record the last numbers, however the run ended. Waits at
        most SHUTDOWN_TIMEOUT_S in all: a run that is stopped while it starts may lack both workers."""
        if self._workers is None:
            return
        if self._endpoint is not None:
            record_changes(self._endpoint, self.recorder)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        if self._workers.finish_learner(FINISH_S):
            self._record_published()
        stats = self._workers.close_gateway(finished=True, timeout_s=max(0.0, deadline - time.monotonic()))
        if stats is not None:
            self._gateway_stats = stats
            segments = stats["segments"]
            self.recorder.record_event("accounting", **segments)
            totals = {f"segments/{name}": segments[name] for name in ("received", "consumed", "queued")}
            drops = {f"drops/{reason}": count for reason, count in segments["dropped"].items()}
            self.recorder.log(
                int(stats["steps"]) + 2, {**totals, **drops, "segments/dropped": sum(segments["dropped"].values())}
            )
        for name, (kind, address) in self._addresses.items():
            self.recorder.record_endpoint(name, kind, address, "closed")

    def _play(
        self, snapshot: WeightSnapshot, play: Callable[[Sequence[PolicyConnection], ActorLearnerSpec], Evaluation]
    ) -> Evaluation:
        """The result of `play`, through the endpoint, which must serve `snapshot` by then."""
        assert self._endpoint is not None
        url, name, size = self._endpoint.url, self.spec.model_name, self.spec.state_size
        with ExitStack() as opened:
            connections = [InferenceConnection(url, name, self.token, state_size=size) for _ in range(NUM_CONNECTIONS)]
            for each in connections:
                opened.callback(each.close)
            choices = find_choices(self.experience)
            mask = np.ones(sum(choices), np.bool_) if choices else None
            wait_for_version(connections[0], self._first_observation, snapshot.version, mask=mask)
            return play(connections, self.spec)
