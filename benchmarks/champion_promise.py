"""Does the champion hold its promise? CartPole-v1 to a champion, and then the 20 episodes that the demo reports.

    python -m benchmarks.champion_promise [--runs N] [--minutes M] [--quick]

Each run is what `make demo` does from the first segment to the last line, without Ray: the gateway, the learner and
the endpoint's predictor in this process, four actors in processes of their own; the trial and the evaluation are the
flow's own functions. Run N has the learner's seed N. The runs are kept in build/benchmarks/champion_promise.jsonl; a
call that ends after M minutes is gone on with by the next, and the last one writes the result.

Besides, each run counts what the old rule would have registered: 20 episodes, their mean less twice its standard error.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from benchmarks.children import scratch
from benchmarks.result import QUICK_RESULTS, Row, compare, options, write
from shoal.actor import ActorClient, play
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.policy_connection import ActionAnswer
from shoal.flows.policy_evaluation import (
    Evaluation,
    evaluate_policies,
    hold_trial,
    is_sure,
)
from shoal.flows.rl_policy import describe_policy_model
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import experience_spec
from shoal.serve.model.predictor import LoadedModel, Predictor
from shoal.wire import ExperienceSpec

TARGET = 475.0
NUM_ACTORS = 4
CAP_S = 300.0  # for each of both: to be solved, and to a champion
POLL_S = 0.5  # as often as the flow looks
TOKEN = os.urandom(16).hex()
KEPT = QUICK_RESULTS / "champion_promise.jsonl"


class PredictorConnection:
    """One version of the policy, asked without a network."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def insist(
        self, observations: np.ndarray, patience_s: float = 0.0, masks: np.ndarray | None = None
    ) -> ActionAnswer:
        (outputs,) = self._model.predict_batch([{"observation": observations}])
        return ActionAnswer(outputs, self._model.version)


class Run:
    """One run, from its first segment to the evaluation of its champion."""

    def __init__(self, loop: LocalLoop, spec: ActorLearnerSpec, predictor: Predictor) -> None:
        self._loop, self._spec, self._predictor = loop, spec, predictor
        self._trials: list[dict[str, Any]] = []

    def result(self) -> dict[str, Any]:
        """What is kept of it."""
        solved_s = self._loop.wait_until_solved(CAP_S)
        champion = self._champion(time.monotonic() + CAP_S)
        evaluation = evaluate_policies([{"": champion}], self._spec)[""]
        return {
            "seed": self._spec.learner.seed,
            "solved_s": solved_s,
            "trials": self._trials,
            "mean_return": evaluation.mean_return,
            "is_held": evaluation.mean_return >= TARGET,
        }

    def _champion(self, deadline_s: float) -> PredictorConnection:
        """The first version that passes its trial, looked for as the flow does. Raises TimeoutError."""
        tried_at = -self._spec.algorithm.updates_between_trials
        while time.monotonic() < deadline_s:
            is_due = self._loop.learner.stats()["updates"] >= tried_at + self._spec.algorithm.updates_between_trials
            if is_due and self._loop.gateway.stats()["mean_return"] >= TARGET:
                snapshot = self._loop.learner.pause()
                connection = PredictorConnection(self._predictor.load(snapshot))
                if self._passes(connection):
                    return connection
                tried_at = self._loop.learner.stats()["updates"]
                self._loop.learner.resume()
            time.sleep(POLL_S)
        raise TimeoutError(f"no version passed its trial within {CAP_S:g} s")

    def _passes(self, connection: PredictorConnection) -> bool:
        trial = hold_trial([{"": connection}], self._spec)
        passes = is_sure(trial, self._spec)
        found = {"mean_return": trial.mean_return, "episodes": len(trial.returns), "seconds": trial.duration_s}
        by_old_rule = passes_old_rule(trial)
        missed = by_old_rule and evaluate_policies([{"": connection}], self._spec)[""].mean_return < TARGET
        self._trials.append(found | {"passes": passes, "old_passes": by_old_rule, "old_missed": missed})
        return passes


def passes_old_rule(trial: Evaluation) -> bool:
    """The mean of 20 episodes, less twice its standard error."""
    returns = np.array(trial.returns[:20])
    return bool(returns.mean() - 2.0 * returns.std(ddof=1) / np.sqrt(len(returns)) >= TARGET)


def act(addresses: Any, ended: Any, token: str, seed: int) -> None:
    """A process that acts in one run after the other, until its address is empty."""
    while address := addresses.get():
        with ActorClient(address, token, f"actor-{seed}") as client:
            play(gymnasium.make("CartPole-v1"), client, seed=seed)
        ended.put("")


@contextmanager
def actors() -> Iterator[tuple[list[Any], Any]]:
    """Queues of the addresses, one for each actor, and one in which an actor says that its run is over."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    addresses, ended = [context.SimpleQueue() for _ in range(NUM_ACTORS)], context.SimpleQueue()
    processes = [context.Process(target=act, args=(each, ended, TOKEN, seed)) for seed, each in enumerate(addresses)]
    with ExitStack() as closing:
        for process, queue in zip(processes, addresses, strict=True):
            process.start()
            closing.callback(process.join)
            closing.callback(queue.put, "")
        yield addresses, ended


def run_all(num_runs: int, minutes: float, kept: Path) -> list[dict[str, Any]]:
    """The runs that are kept, with those that the time is enough for."""
    done = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    end_s = time.monotonic() + 60.0 * minutes
    space = gymnasium.make("CartPole-v1")
    with scratch() as folder, actors() as (addresses, ended):
        for seed in range(len(done) + 1, num_runs + 1):
            if time.monotonic() > end_s:
                break
            spec = ActorLearnerSpec(env="CartPole-v1", target_return=TARGET).override([f"learner.seed={seed}"])
            experience: ExperienceSpec = experience_spec(space.observation_space, space.action_space, spec)
            predictor = Predictor(*describe_policy_model(spec, experience), spec.endpoint.options(spec.model_name))
            with LocalLoop(spec, experience, folder / f"run-{seed}", TOKEN, TARGET) as loop:
                for queue in addresses:
                    queue.put(loop.address)
                done.append(Run(loop, spec, predictor).result())
            for _ in addresses:
                ended.get()
            kept.parent.mkdir(parents=True, exist_ok=True)
            with kept.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(json.dumps(done[-1]), flush=True)
    return done[:num_runs]


def rows_of(runs: list[dict[str, Any]]) -> list[Row]:
    trials = [trial for run in runs for trial in run["trials"]]
    num_held = sum(run["is_held"] for run in runs)
    old = [trial for trial in trials if trial["old_passes"]]
    found = f"{len(trials)} trials in {len(runs)} runs; the rule before would have passed {len(old)} of these versions"
    note = f"{found}, of which {sum(trial['old_missed'] for trial in old)} missed the target in their 20 episodes"
    return [
        compare(
            f"champions of {len(runs)} runs whose 20 episodes return the target of {TARGET:g}", "runs", "higher",
            [num_held], bar=float(len(runs)), bar_kind="value", note=note,
        ),
        compare("mean return of a champion's 20 episodes", "", "higher", [run["mean_return"] for run in runs]),
        compare("trials until a version passes", "trials", "lower", [float(len(run["trials"])) for run in runs]),
        compare("a trial that passes, without a network", "s", "lower", [
            trial["seconds"] for trial in trials if trial["passes"]
        ]),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=100, minutes=9.0)
    kept = KEPT.with_name("champion_promise_quick.jsonl") if chosen.quick else KEPT
    runs = run_all(chosen.runs, chosen.minutes, kept)
    if len(runs) < chosen.runs:
        print(f"{len(runs)} of {chosen.runs} runs are done: the same command goes on")
        return
    write("champion_promise", rows_of(runs), chosen.results)
    kept.unlink()


if __name__ == "__main__":
    main()
