"""How a run of the loop evaluates its policies: by episodes that are played through its endpoint.

The interface of an extension of the group `shoal.evaluators`, whose word is `play`. Without it no version has a trial,
and none is evaluated: a run registers what one without an environment does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from shoal.flows.actor_learner_spec import ONLY_POLICY, ActorLearnerSpec
from shoal.plugins.find import find_optional
from shoal.registry import ModelVersion
from shoal.runs import RunRecorder
from shoal.runs.formatting import format_number
from shoal.weights import WeightSnapshot

if TYPE_CHECKING:
    from shoal.flows.loop_policy import LoopPolicy


class Evaluation(NamedTuple):
    """`returns` of the episodes, in order; the number of requests and seconds; the versions that answered."""

    returns: list[float]
    num_requests: int
    versions: set[int]
    duration_s: float

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns))

    def is_better_than(self, other: Evaluation) -> bool:
        """Whether its mean return is higher by more than twice the standard error of the difference."""
        first, second = np.asarray(self.returns), np.asarray(other.returns)
        error = math.sqrt(first.var() / len(first) + second.var() / len(second))
        return float(first.mean() - second.mean()) > 2 * error


class Evaluator(Protocol):
    """Plays one run's episodes. Its calls raise ConnectionLost and InferenceError of an endpoint that does not answer,
    ConfigError of an environment, RunError for episodes that do not end; so do its futures."""

    def start_trial(self, action: str, snapshot: WeightSnapshot) -> Future[Evaluation]:
        """Begin a trial of this version of the only policy, which the endpoint has or will have. Does not wait."""

    def judge(self, trials: Sequence[Evaluation], version: int, action: str) -> dict[str, Any]:
        """What a record says of the last trial: whether it `passes`, and the `reason` if not."""

    def probe(self) -> float | None:
        """The mean return of best actions that have just been played; begins to play some when it is time."""

    def evaluate(self, action: str, candidates: Sequence[WeightSnapshot]) -> dict[str, Evaluation]:
        """Play the candidates, one of each policy, once the endpoint has them; by policy, without an environment of
        none. What is being played is given up."""

    def close(self) -> None:
        """End without waiting, also for what is being played. Idempotent."""


@dataclass(frozen=True)
class EvaluationSite:
    """What an Evaluator is made of.

    policies: with the names, observations and specs of what the endpoint at `url` serves
    call:     `call(function, *arguments)` calls it in a process that reaches the endpoint; None: this one does
    """

    spec: ActorLearnerSpec
    policies: Sequence[LoopPolicy]
    url: str
    token: str
    call: Callable[..., Any] | None = None

    def open(self) -> Evaluator | None:
        """None without the extension."""
        make = find_optional("play", "shoal.evaluators")
        evaluator: Evaluator | None = make(self) if make else None
        return evaluator


def choose_action(trials: Mapping[str, Evaluation]) -> str:
    """The best actions, unless sampled ones return more by more than chance."""
    if len(trials) == 1:
        return next(iter(trials))
    return "sampled" if trials["sampled"].is_better_than(trials["best"]) else "best"


def describe_registered(model: ModelVersion, evaluation: Evaluation | None, action: str, spec: ActorLearnerSpec) -> str:
    name = f"{model.ref} ({', '.join(model.aliases)})" if model.aliases else model.ref
    decision = f"\n{model.decision}" if model.decision else ""
    if evaluation is None:
        lacks = "the run has no environment to play" if spec.given else "no library that plays episodes is installed"
        return f"{name}: not evaluated, for {lacks}{decision}"
    if not evaluation.returns:
        return f"{name}: no episode of the evaluation had one of its agents{decision}"
    return (
        f"{name}: mean return {format_number(evaluation.mean_return)} over {len(evaluation.returns)} episodes played"
        f" through the endpoint with action={action} ({evaluation.num_requests} requests){decision}"
    )


def record_evaluation(recorder: RunRecorder, step: int, played: Mapping[str, Evaluation]) -> None:
    """played: of each policy that had an agent in an episode, if any had; step: of the metrics"""
    if not played:
        return
    if ONLY_POLICY not in played:
        recorder.log(step, {f"evaluation/{name}": each.mean_return for name, each in played.items()})
        recorder.record_event(
            "policies_evaluated",
            returns={name: each.returns for name, each in played.items()},
            versions={name: sorted(each.versions) for name, each in played.items()},
            seconds=max(each.duration_s for each in played.values()),
        )
        return
    evaluation = played[ONLY_POLICY]
    metrics = {
        "evaluation/mean": evaluation.mean_return,
        "evaluation/requests": evaluation.num_requests,
        "endpoint/requests_per_s": evaluation.num_requests / evaluation.duration_s,
    }
    recorder.log(step, metrics)
    recorder.record_event(
        "evaluated",
        mean_return=evaluation.mean_return,
        returns=evaluation.returns,
        requests=evaluation.num_requests,
        versions=sorted(evaluation.versions),
    )
