"""The loop: external actors train the policies of a run, which an endpoint already serves; the best are registered.

    endpoint up ► gateways and learners up ► actors join ► solved ► trial ► registered ► evaluated through the endpoint

A run has one policy, or several, each for other agents of its environment. Each policy is a loop of its own (gateway,
queue, ledger, learner, weights, checkpoints). An actor connects to all gateways, and each segment goes to the gateway
of the policy whose agent has played it.

The candidate of one policy passes a trial before it is registered: the actors' mean return mixes many versions and an
exploring policy, while the trial plays this one version as it will be served. Meanwhile the endpoint holds it, and
learning goes on. A candidate that fails is not registered; one that passes is published again, as the newest.
Several policies have no trial: they may play against each other, and reach their targets one after the other.

Called by jobs such as `jobs/actor_learner.py`, in a process connected to a Ray cluster. It owns the order of events and
the run record; the gateways, the learners and the replicas do the work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import SecretStr

from shoal.actor.environment import describe_joining
from shoal.cluster.admission import RunAdmission
from shoal.errors import (
    ClusterError,
    ConnectionLost,
    InferenceError,
    NotReached,
    RecordUnwritable,
    RunError,
    needs_extra,
)
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.evaluation import (
    Evaluation,
    EvaluationSite,
    Evaluator,
    choose_action,
    describe_registered,
    record_evaluation,
)
from shoal.flows.loop_policy import (
    BEST_RETURN,
    TRIAL_RETURN,
    LoopPolicy,
    announce_websocket,
    close_gateways,
    describe_missed_targets,
    describe_other_addresses,
    format_mean_returns,
    join_addresses,
    require_capacity,
    require_experience,
)
from shoal.flows.rl_metrics import HistorySampler, combine_policies, select_lags, select_rejections, select_win_rates
from shoal.flows.rl_policy import check, keep_spaces, list_actions
from shoal.flows.run_flow import recorded_run
from shoal.flows.serving import list_addresses, record_changes
from shoal.home import load_access_token
from shoal.rl.gateway.zmq_listener import load_curve_keys
from shoal.rl.ray_workers import take_spaces
from shoal.runs import RunRecorder, Status
from shoal.runs.waits import print_line
from shoal.serve.on_ray.ownership import require_free_name
from shoal.weights import WeightSnapshot
from shoal.wire import ExperienceSpec

if TYPE_CHECKING:
    from shoal.serve.on_ray.deployment import DeployedEndpoint

POLL_S = 0.5
FINISH_S = 5.0  # for the learners to save when the run is stopped
SHUTDOWN_TIMEOUT_S = 10.0  # for that and for the gateways' bye: Ray kills a job that takes 15 s to stop
PRINT_S = 2.0
WAITING_PRINT_S = 30.0  # until an actor has sent anything


def run_actor_learner(spec: ActorLearnerSpec, job: str) -> str:
    """Run the loop to its end and return the run's id. Raises NotReached without the target, NoCapacity when its
    workers have waited for their places in vain."""
    spec = keep_spaces(spec)
    checked = check(spec)
    # Closes the record first: it must be right even when the rest is cut short.
    with ExitStack() as closing, recorded_run(spec, job, "loop", "gateway_ready") as recorder:
        staying = closing.enter_context(ExitStack())
        spec = take_spaces(spec, recorder, load_access_token(), staying)
        run = LoopRun(spec, recorder, checked or check(spec))
        try:
            try:
                run.start(closing)
                staying.close()
                run.learn()
                run.finish()
                for each in run.policies:
                    each.require_actors(recorder.id)
            finally:
                run.shut_down()
        except KeyboardInterrupt:  # after the learners have saved: Ray may leave no time for more
            for each in run.policies:
                each.register_learnt(recorder)
            raise
        if run.missed:
            recorder.finish(Status.NOT_REACHED, run.missed)
    if run.missed:
        raise NotReached(run.missed)
    return recorder.id


class LoopRun:
    """The policies of one run, and its state."""

    def __init__(
        self, spec: ActorLearnerSpec, recorder: RunRecorder, checked: Mapping[str, tuple[ExperienceSpec, np.ndarray]]
    ) -> None:
        self.spec = spec
        self.recorder = recorder
        self.token = load_access_token()
        policies = spec.split_by_policy()
        self.policies = [LoopPolicy(name, policies[name], *each) for name, each in checked.items()]
        self._endpoint: DeployedEndpoint | None = None
        self._server_key = self._how_to_join = ""
        self._addresses: dict[str, tuple[str, str]] = {}  # name -> kind, address
        self._history_sampler, self._printed_at = HistorySampler(time.monotonic()), 0.0
        self._learning_since: float | None = None  # by time.monotonic(), in this incarnation of the run
        self.missed = ""  # what the run lacks of its targets, at its end
        self._is_solved = False
        self._failed_trial = ""
        self._num_requests = 0.0
        self._failed = list[Evaluation]()
        self._candidates, self._action = list[WeightSnapshot](), "best"  # of each policy, to register; how they act
        self._evaluator: Evaluator | None = None  # once the endpoint is up, where a library has one

    @property
    def _only(self) -> LoopPolicy | None:
        """The policy of a run that has one."""
        return None if self.policies[0].name else self.policies[0]

    # -- up -------------------------------------------------------------------------------------------------------

    def start(self, closing: ExitStack) -> None:
        """Start every part; the gateways are announced last, when an endpoint already serves."""
        spec, recorder = self.spec, self.recorder
        keys = load_curve_keys(recorder.folder) if spec.gateway.curve else None
        require_free_name(spec.model_name)
        admission = RunAdmission(recorder.id, spec.priority)
        closing.callback(admission.close)
        require_capacity(self.policies, spec, admission, self._note)
        served = []
        for each in self.policies:
            served.append(each.start(recorder.id, recorder.folder, self.token, keys))
            closing.callback(each.workers.close)
        endpoint_spec = spec.endpoint.model_copy(update={"name": spec.model_name, "token": SecretStr(self.token)})
        with needs_extra("serve"):  # Serve takes a second to load: not for `--check`
            from shoal.serve.on_ray.deployment import deploy
            from shoal.serve.on_ray.ingress_front import call_on_head, is_on_head

        self._endpoint = deploy(endpoint_spec, served, record=self._note)
        admission.mark_running()
        closing.callback(self._endpoint.close)
        call = None if is_on_head() else call_on_head
        self._evaluator = EvaluationSite(spec, self.policies, self._endpoint.url, self.token, call).open()
        for name, (kind, address) in list_addresses(self._endpoint).items():
            self._record_endpoint(name, kind, address)
        models = "NAME, of " * (not self._only) + ", ".join(each.spec.model_name for each in self.policies)
        print_line(f"run {recorder.id}: the endpoint is {self._endpoint.url}/v2/models/{models}")
        self._server_key = keys[0].decode() if keys else ""
        for each in self.policies:
            each.wait_for_gateway()
        self._announce_gateways()

    def _announce_gateways(self) -> None:
        (address, _), others = join_addresses(self.policies), describe_other_addresses(self.policies)
        env = self.spec.env
        key = self._server_key
        ignored = self.spec.ignore
        known = {"address": address, "env": env, "server_key": key, "ignore": list(ignored)}
        self._note("gateway_ready", **known, record_every=self.spec.record_every, **others)
        self._record_endpoint("gateway", "gateway", address)
        if websocket := others.get("websocket", ""):
            announce_websocket(self.policies, self.recorder.id)
            self._record_endpoint("websocket", "websocket", websocket)
        self._how_to_join = describe_joining(others.get("connect", address), websocket, env, key, ignored)
        print_line(f"run {self.recorder.id}: {self._how_to_join}")
        self._printed_at = time.monotonic()

    def _record_endpoint(self, name: str, kind: str, address: str) -> None:
        self._addresses[name] = (kind, address)
        with suppress(RecordUnwritable):
            self.recorder.record_endpoint(name, kind, address, "ready")

    def _note(self, kind: str, **details: Any) -> None:
        """Record an event. The recorder retries failed writes later, so the run goes on."""
        with suppress(RecordUnwritable):
            self.recorder.record_event(kind, **details)

    # -- on -------------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Learn until the targets are reached and the newest version passes its trial, or, without a target, for
        `max_wall_s`, after which a target is `missed`. Raises RunError if nothing can be learnt."""
        while True:
            self._follow_until_done()
            self._candidates = [each.workers.pause_learner() for each in self.policies]
            self._action = list_actions(self.spec, self.policies[0].experience)[0]
            if self.missed or self.spec.given or self._evaluator is None:
                self._candidates = [each.choose_best(self._candidates[i]) for i, each in enumerate(self.policies)]
                return
            if self._only is None or self._try(self._only, self._candidates[0]):
                self._poll()  # records the trial's return
                return

    def _try(self, policy: LoopPolicy, snapshot: WeightSnapshot) -> bool:
        """Whether this version passes a trial, and is the newest again. With a target the learner goes on during the
        trial, and after one that fails."""
        policy.tried_at = policy.updates
        if self.spec.target_return is None:
            if not (passes := self._passes(snapshot)):
                policy.workers.resume_learner()
            return passes
        policy.workers.hold(snapshot)
        policy.workers.resume_learner()
        if passes := self._passes(snapshot):
            policy.workers.pause_learner()
            self._candidates = [policy.workers.republish(snapshot)]
            policy.solved_s = policy.solved_s or policy.gateway["elapsed_s"]
            self._note_solved(f"mean return {policy.trial_return:.4g} of a trial", action=self._action)
        policy.workers.hold(None)
        return passes

    def _passes(self, snapshot: WeightSnapshot) -> bool:
        """Whether this version of the only policy, played through the endpoint, will reach the target with near
        certainty: with its best actions, or else with sampled ones. A failed attempt to play counts as no, and is
        retried later; after the time limit its error is raised (ConnectionLost, InferenceError)."""
        assert self._evaluator is not None
        trials = dict[str, Evaluation]()
        for action in list_actions(self.spec, self.policies[0].experience):
            try:
                trials[action] = trial = self._hold_trial(action, snapshot)
            except (ConnectionLost, InferenceError) as error:
                if self._time_is_up():
                    raise
                return self._was_not_tried(snapshot, str(error))
            if trial.versions != {snapshot.version}:  # a restarted learner has published, or the endpoint refused it
                return self._was_not_tried(snapshot, f"versions {sorted(trial.versions)} answered")
            names = [TRIAL_RETURN, BEST_RETURN] if action == "best" else [TRIAL_RETURN]
            self.policies[0].played |= dict.fromkeys(names, trial.mean_return)
            details = self._evaluator.judge([*self._failed, trial], snapshot.version, action)
            self._note("tried", **details)
            if details["passes"] and self.spec.target_return is not None:
                self._action, self.policies[0].trial_return = action, trial.mean_return
                return True
            if not details["passes"]:
                self._failed.append(trial)
                self._failed_trial = details["reason"]
                print_line(f"{self._failed_trial}: learning on")
        self._action = choose_action(trials)
        self.policies[0].trial_return = trials[self._action].mean_return
        if self.spec.target_return is None:
            self._prefer_retained(snapshot, trials[self._action])
        return self.spec.target_return is None

    def _prefer_retained(self, newest: WeightSnapshot, trial: Evaluation) -> None:
        """Take the version at the actors' best mean return as the candidate, if its trial returns more than the
        newest's by more than chance: a run may have collapsed since. The newest stays, if the other cannot be tried."""
        policy = self.policies[0]
        if policy.retained is None or policy.retained.version == newest.version or self.spec.self_play.is_on:
            return
        self._candidates = [policy.workers.republish(policy.retained)]
        try:
            retained = self._hold_trial(self._action, self._candidates[0])
        except (ConnectionLost, InferenceError) as error:
            self._was_not_tried(policy.retained, str(error), "the newest is registered")
            retained = trial
        if not retained.is_better_than(trial):
            self._candidates = [policy.workers.republish(newest)]
            return
        policy.trial_return = retained.mean_return
        returns = {"mean_return": retained.mean_return, "newest_mean_return": trial.mean_return}
        self._note("kept_version", version=policy.retained.version, newest=newest.version, **returns)
        print_line(f"version {policy.retained.version}, which returns more than the newest, is registered")

    def _was_not_tried(self, snapshot: WeightSnapshot, why: str, then: str = "learning on") -> bool:
        self._note("trial_failed", version=snapshot.version, error=why)
        print_line(f"version {snapshot.version} could not be tried ({why}): {then}")
        return False

    def _hold_trial(self, action: str, snapshot: WeightSnapshot) -> Evaluation:
        """Play a trial of this version, which the endpoint has or will have, and go on polling."""
        assert self._evaluator is not None
        trial = self._evaluator.start_trial(action, snapshot)
        self._follow_until_done(trial)
        return trial.result()

    def _follow_until_done(self, trial: Future[Evaluation] | None = None) -> None:
        """Poll, record and print, until the trial ends, if there is one. Raises RunError when a learner has failed, or
        there was nothing to learn from."""
        while True:
            polled_at = time.monotonic()
            self._poll()
            for each in self.policies:
                if failure := each.learner.get("failure"):
                    raise RunError(f"the learner{f' of {each.name}' * bool(each.name)} failed: {failure}")
            if trial is None:
                self._probe()
                if self._is_done() or self._has_missed_targets():
                    return
            if wait([trial or Future()], max(0.0, polled_at + POLL_S - time.monotonic())).done:  # or else it sleeps
                return

    def _is_done(self) -> bool:
        """Whether the actors have reached the targets; without any, whether the time is over."""
        if all(each.spec.target_return is None for each in self.policies):
            if is_over := self._time_is_up():
                require_experience(self.policies, self.spec)
            return is_over
        if all(each.is_solved for each in self.policies):
            self._note_solved(f"{format_mean_returns(self.policies)} over 100 episodes")
        if self._only is None:
            return self._is_solved
        return self._only.may_be_tried and not (self._failed_trial and self._time_is_up())

    def _note_solved(self, how: str, **details: Any) -> None:
        if self._is_solved:
            return
        self._is_solved = True
        seconds = max(each.solved_s or 0.0 for each in self.policies)
        steps = sum(each.gateway.get("solved_steps") or each.num_steps for each in self.policies)
        self._note("solved", seconds=seconds, steps=steps, **details)
        after = f"{seconds:.1f} s after the first segment, {steps:,} environment steps"
        print_line(f"solved: {how}, {after}")

    def _probe(self) -> None:
        """Let best actions be played now and then, and keep their mean return."""
        policy = self.policies[0]
        if self._evaluator is None or not policy.may_be_probed:
            return
        if (mean_return := self._evaluator.probe()) is not None:
            policy.played[BEST_RETURN] = mean_return

    def _time_is_up(self) -> bool:
        return self._learning_since is not None and time.monotonic() - self._learning_since > self.spec.max_wall_s

    def _has_missed_targets(self) -> bool:
        """Whether the time is over. Raises RunError where no episode has ended, so that no version is any good."""
        if self._time_is_up():
            self.missed = describe_missed_targets(self.policies, self.spec, self._failed_trial, self.recorder.id)
        return bool(self.missed)

    def _poll(self) -> None:
        for each in self.policies:
            named = {"policy": each.name} if each.name else {}
            for kind, details in each.poll():
                self._note(kind, **named, **details)
            each.keep_best()
        known = [self._addresses.get(name, ("", ""))[1] for name in ("gateway", "websocket")]
        if known != list(join_addresses(self.policies)):
            self._announce_gateways()  # on another host, or another process had taken a port
        self._record_published()
        assert self._endpoint is not None
        record_changes(self._endpoint, self.recorder)
        if self._learning_since is None and any(each.has_experience for each in self.policies):
            self._learning_since = time.monotonic()
        if self._learning_since is None and time.monotonic() - self._printed_at >= WAITING_PRINT_S:
            self._printed_at = time.monotonic()
            print_line(f"run {self.recorder.id}: waiting for actors: {self._how_to_join}")
        if self._learning_since is not None and all(each.gateway for each in self.policies):
            self._log()
            if time.monotonic() - self._printed_at >= PRINT_S:
                self._printed_at = time.monotonic()
                print_line(self._describe_progress())

    def _log(self) -> None:
        assert self._endpoint is not None
        try:  # the last known count stays while a replica restarts, which must not stop learning
            self._num_requests = float(sum(replica["requests"] for replica in self._endpoint.stats()))
        except ClusterError as error:
            self._note("endpoint_silent", error=str(error))
        metrics = combine_policies({each.name: each.compute_metrics(self._num_requests) for each in self.policies})
        in_history = self._history_sampler.should_keep(time.monotonic())
        step = int(metrics["steps/total"])
        gateways = {each.name: each.gateway for each in self.policies}
        with suppress(RecordUnwritable):
            self.recorder.log(step, metrics, in_history=in_history)
            self.recorder.log_group(step, "actor_lag", select_lags(self.policies[0].gateway))
            self.recorder.log_group(step, "rejected", select_rejections(*gateways.values()))
            self.recorder.log_group(step, "win_rate", select_win_rates(gateways))

    def _record_published(self) -> None:
        """The versions of the only policy; those of several have the same numbers, and are not recorded."""
        for policy in self.policies:
            published = policy.workers.take_published()
            with suppress(RecordUnwritable):
                for each in published if policy is self._only else ():
                    self.recorder.record_weights(*each)

    def _describe_progress(self) -> str:
        if self._only is not None:
            return self._only.describe_progress()
        return f"{format_mean_returns(self.policies)} | {sum(each.num_steps for each in self.policies):9,} steps"

    # -- down -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Register the weights of all policies, and evaluate them through the endpoint."""
        models = {}
        for each, snapshot in zip(self.policies, self._candidates, strict=True):
            if self.missed and (self._only or not each.is_solved):  # what follows champion keeps what it has
                each.withhold_champion()
            models[each.name] = each.register(snapshot, self.recorder, self._action)
        played = {} if self._evaluator is None else self._evaluator.evaluate(self._action, self._candidates)
        step = sum(each.num_steps for each in self.policies) + 1
        record_evaluation(self.recorder, step, {name: each for name, each in played.items() if each.returns})
        for name, model in models.items():
            print_line(describe_registered(model, played.get(name), self._action, self.spec))

    def shut_down(self) -> None:
        """Let the learners save, end the actors' sessions and record the last numbers, however the run ended. Waits at
        most SHUTDOWN_TIMEOUT_S in all: a run that is stopped while it starts may lack workers."""
        if self._evaluator is not None:
            self._evaluator.close()
        started = [each for each in self.policies if each.has_started]
        if not started:
            return
        if self._endpoint is not None:
            record_changes(self._endpoint, self.recorder)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        with ThreadPoolExecutor(len(started)) as threads:  # all at once: they share the time
            has_saved = list(threads.map(lambda each: each.workers.finish_learner(FINISH_S), started))
        if all(has_saved):
            self._record_published()
        close_gateways(started, self.recorder, deadline)
        for name, (kind, address) in self._addresses.items():
            self.recorder.record_endpoint(name, kind, address, "closed")
