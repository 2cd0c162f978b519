"""Plays a run's episodes through its endpoint: the evaluation of its policies, the trial of one before it, and probes
of best actions while it learns.

The trial makes sure that the evaluation will reach the target. The core makes an EpisodePlayer for each run, as its
Evaluator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import numpy as np

from shoal.extend.flows import ONLY_POLICY, ActorLearnerSpec, Evaluation, EvaluationSite
from shoal.extend.runs import format_number
from shoal.libs.evaluation.connection import (
    InferenceConnection,
    PolicyAddress,
    PolicyConnection,
    ask_policy,
    wait_for_version,
)
from shoal.libs.evaluation.episodes import Connections, play_through
from shoal.weights import WeightSnapshot

NUM_CONNECTIONS = 2  # the endpoint computes for one while this process steps the environments of the other
TRIAL_SEED, EVALUATION_SEED = 20_000, 10_000  # the trial selects, so the evaluation must have other episodes
PROBE_SEED = 30_000
PAUSE_FACTOR = 19  # pauses between probes are so many times as long as a probe: they take 5% of the time at most
MAX_MISS_PROBABILITY = 1e-3  # that an evaluation misses the target after a passed trial
MIN_EPISODES = 20  # for a mean: with fewer, luck decides in many environments
NUM_FULL_REASONS = 2  # of failed trials, before it is said what to do
REMIND_EVERY = 50  # failed trials it is said once more
NUM_RESAMPLES = 50_000  # estimates a probability of MAX_MISS_PROBABILITY within 15%


class EpisodePlayer:
    """The Evaluator of a run: trials and probes are played in a thread of its own, one at a time."""

    def __init__(self, site: EvaluationSite) -> None:
        self._site, self._spec = site, site.spec
        self._thread = ThreadPoolExecutor(1, "episode-player")
        self._cancelled = threading.Event()  # what is being played
        self._probe: Future[float | None] | None = None
        self._due_s = 0.0  # of the next probe

    def start_trial(self, action: str, snapshot: WeightSnapshot) -> Future[Evaluation]:
        """Begin a trial of this version. A probe that has not ended is given up."""
        self._cancelled.set()
        self._cancelled = cancelled = threading.Event()
        return self._thread.submit(self._play, hold_trial, action, [snapshot], cancelled)

    def judge(self, trials: Sequence[Evaluation], version: int, action: str) -> dict[str, Any]:
        """See Evaluator. After others that failed the reason says what to do, and then is short."""
        spec, trial = self._spec, trials[-1]
        miss = estimate_miss(trial, spec)
        passes = miss < MAX_MISS_PROBABILITY
        target, returned = spec.target_return, f"version {version} returned {format_number(trial.mean_return)}"
        reason = "" if passes else returned
        if reason and len(trials) <= NUM_FULL_REASONS:
            reason += (
                f" over {len(trial.returns)} episodes of a trial with action={action}, and would miss"
                f" {target:g} in others with a probability of {miss:.2g}, where {MAX_MISS_PROBABILITY:g} is allowed"
            )
        elif reason and len(trials) % REMIND_EVERY == NUM_FULL_REASONS + 1:
            nearest = max(trials, key=lambda each: each.mean_return)
            sure = np.quantile(resample_means(nearest, max(spec.eval_episodes, MIN_EPISODES)), MAX_MISS_PROBABILITY / 2)
            reason += (
                f" in its trial with action={action}; the nearest trial returned {format_number(nearest.mean_return)}"
            )
            reason += f", and would pass target_return={sure:.4g}: lower it, or raise max_wall_s={spec.max_wall_s:g}"
        result = {"mean_return": trial.mean_return, "episodes": len(trial.returns), "passes": passes, "action": action}
        bound = {"miss_probability": miss, "allowed": MAX_MISS_PROBABILITY, "target": target}
        return {"version": version, "seconds": trial.duration_s, **result, **bound, "reason": reason}

    def probe(self) -> float | None:
        """The mean return of a probe that has just ended; begin one when it is time."""
        found = None
        if self._probe is None and time.monotonic() >= self._due_s:
            self._cancelled = cancelled = threading.Event()
            self._probe = self._thread.submit(self._run_probe, cancelled)
        elif self._probe is not None and self._probe.done():
            found, self._probe = self._probe.result(), None
        return found

    def evaluate(self, action: str, candidates: Sequence[WeightSnapshot]) -> dict[str, Evaluation]:
        """Play `spec.eval_episodes`, which differ from the trial's; by policy, without an environment of none. Raises
        as `play_through` does."""
        self._cancelled.set()
        with self._connect(action, candidates) as connections:
            return evaluate_policies(connections, self._spec)

    def close(self) -> None:
        self._cancelled.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _connect(
        self, action: str, candidates: Sequence[WeightSnapshot] = (), cancelled: threading.Event | None = None
    ) -> Iterator[Sequence[Connections]]:
        """Connections to all policies at the endpoint, for such actions, when it serves the candidates; until
        `cancelled` is set, which ends the waiting for that, too."""
        site, stopped = self._site, cancelled or threading.Event()
        with ExitStack() as opened:

            def connect(policy: ActorLearnerSpec) -> PolicyConnection:
                address = PolicyAddress(site.url, policy.model_name, site.token, policy.state_size, action)
                if site.call is not None:
                    return PolicyConnection(partial(site.call, ask_policy, address), stopped)
                return PolicyConnection(opened.enter_context(closing(InferenceConnection(address))).infer, stopped)

            connections = [{each.name: connect(each.spec) for each in site.policies} for _ in range(NUM_CONNECTIONS)]
            for policy, snapshot in zip(site.policies, candidates, strict=False):
                observation, mask = policy.first_inputs
                wait_for_version(connections[0][policy.name], observation, snapshot.version, mask)
            yield connections

    def _play(self, play: Callable[..., Evaluation], *setting: Any) -> Evaluation:
        with self._connect(*setting) as connections:
            return play(connections, self._spec)

    def _run_probe(self, cancelled: threading.Event) -> float | None:
        began_s = time.monotonic()
        try:
            return self._play(probe_policy, "best", (), cancelled).mean_return
        except Exception:  # noqa: BLE001 - as while a replica restarts: no probe ends the run, and the next may succeed
            return None
        finally:
            self._due_s = time.monotonic() + PAUSE_FACTOR * (time.monotonic() - began_s)


def hold_trial(connections: Sequence[Connections], spec: ActorLearnerSpec) -> Evaluation:
    """Play `spec.num_trial_episodes` of a run with one policy, as many at a time as the connections allow; stop early
    when the version cannot pass even if each remaining episode equals the best so far. Raises as `play_through`
    does."""
    at_once = spec.endpoint.options(spec.model_name).max_rows * len(connections)
    trial = Evaluation([], 0, set(), 0.0)
    while (num_missing := spec.num_trial_episodes - len(trial.returns)) > 0:
        num_episodes = min(at_once, num_missing)
        played = _play(connections, spec, num_episodes, TRIAL_SEED + len(trial.returns))[ONLY_POLICY]
        trial = Evaluation(
            trial.returns + played.returns,
            trial.num_requests + played.num_requests,
            trial.versions | played.versions,
            trial.duration_s + played.duration_s,
        )
        at_best = trial.returns + [max(trial.returns)] * (spec.num_trial_episodes - len(trial.returns))
        if not is_sure(trial._replace(returns=at_best), spec):
            break
    return trial


def probe_policy(connections: Sequence[Connections], spec: ActorLearnerSpec) -> Evaluation:
    """Play some episodes of a run with one policy while it learns. Raises as `play_through` does."""
    return _play(connections, spec, max(spec.eval_episodes, MIN_EPISODES), PROBE_SEED)[ONLY_POLICY]


def evaluate_policies(connections: Sequence[Connections], spec: ActorLearnerSpec) -> dict[str, Evaluation]:
    """See `EpisodePlayer.evaluate`."""
    return {} if spec.given else _play(connections, spec, spec.eval_episodes, EVALUATION_SEED)


def _play(
    connections: Sequence[Connections], spec: ActorLearnerSpec, num_episodes: int, seed: int
) -> dict[str, Evaluation]:
    timeout_s = spec.eval_timeout_s * max(1.0, num_episodes / spec.eval_episodes)
    max_rows = {name: own.endpoint.options(own.model_name).max_rows for name, own in spec.split_by_policy().items()}
    policy_of = spec.assign_policies()
    return play_through(connections, spec.env, num_episodes, seed, max_rows, timeout_s, spec.ignore, policy_of)


def resample_means(evaluation: Evaluation, num_episodes: int) -> np.ndarray:
    """Estimate mean returns of `num_episodes` other episodes, float64 [NUM_RESAMPLES], from these episodes by the
    bootstrap (Efron 1979). It assumes no distribution of returns: many are capped, as CartPole's, and a sum of
    twenty of those is far from normal."""
    random, returns = np.random.default_rng(0), np.asarray(evaluation.returns)
    means = [random.choice(returns, (1000, num_episodes)).mean(axis=1) for _ in range(NUM_RESAMPLES // 1000)]
    return np.concatenate(means)


def is_sure(trial: Evaluation, spec: ActorLearnerSpec) -> bool:
    """Whether a version with this trial will reach the target in its evaluation, with near certainty."""
    return estimate_miss(trial, spec) < MAX_MISS_PROBABILITY


def estimate_miss(trial: Evaluation, spec: ActorLearnerSpec) -> float:
    """The probability that other episodes, as many as an evaluation has, miss the target."""
    if spec.target_return is None:
        return 0.0
    return float(np.mean(resample_means(trial, max(spec.eval_episodes, MIN_EPISODES)) < spec.target_return))
