"""A population of learners as a run: rounds of learning, scores, copies and changes in place, and the best registered.

    restore ► (learn ► scores ► decisions ► copies and changes ► checkpoint ► record) for each round ► register

Called by `jobs/rl_population.py`, and by tests without a cluster: nothing here needs Ray but `rl_population_main`. All
learners are threads of this process; actors are processes. The state is saved after each round.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import shoal.runs
from shoal import checkpoint
from shoal.cluster.job_main import expected_run_id, job_main
from shoal.flows.rl_policy import describe_policy_model, inspect_environment
from shoal.libs.population.evolution import Decisions, Restart, build_evolution
from shoal.libs.population.flow.continuation import choose_spec, require_continuation
from shoal.libs.population.flow.state import PopulationState, describe_decisions
from shoal.libs.population.lineage import Lineage
from shoal.libs.population.loop.members import LoopMember, shrink_and_perturb
from shoal.libs.population.loop.spec import RLPopulationSpec, require_local
from shoal.random_state import preserve_rng
from shoal.registry import Registry
from shoal.runs import RunKind, RunRecorder
from shoal.runs.report.event_messages import NO_CHECKPOINT
from shoal.weights import WeightSnapshot
from shoal.wire import ExperienceSpec

JOB = "rl_population"
POLL_S = 0.1
RECORD_S = 1.0
UNCHANGED = (
    "env",
    "ignore",
    "normalize_observations",
    "normalize_rewards",
    "algorithm",
    "hidden",
    "members",
    "space",
    "evolution",
    "steps_per_round",
    "seed",
)


def rl_population_main(recipe: RLPopulationSpec) -> None:
    """The main function of jobs/rl_population.py."""
    job_main(partial(choose_spec, recipe), run_rl_population, JOB, check_rl_population)


def check_rl_population(spec: RLPopulationSpec) -> ExperienceSpec:
    """Raises ConfigError with field, value and remedy for a run that could not work, SpecMismatch for another run's."""
    if spec.resume:
        require_continuation(spec, UNCHANGED)
    require_local(spec)
    build_evolution(spec.evolution, spec.search_space, spec.members, num_rounds=spec.rounds)
    experience, _ = inspect_environment(spec)
    return experience


def run_rl_population(spec: RLPopulationSpec, job: str = JOB) -> str:
    """Learn and evolve to the end, register the best policy, and return the run's id. Raises a ShoalError."""
    experience = check_rl_population(spec)
    with shoal.runs.recording(
        spec.to_record(),
        job,
        begun="population",
        kind=RunKind.POPULATION,
        resumed=spec.resume,
        run_id=expected_run_id(),
    ) as recorder:
        print(f"run {recorder.id}: {spec.members} learners of {spec.env}", flush=True)
        with ExitStack() as opened:
            population = RLPopulation(spec, experience, recorder)
            for member in population.members:
                opened.enter_context(member)
            population.run()
        _finish(population, experience, recorder)
    shoal.runs.write_report_at_end(recorder.id)
    return recorder.id


class RLPopulation:
    """The members and the rounds. The members are entered before `run`, and exited after it."""

    def __init__(self, spec: RLPopulationSpec, experience: ExperienceSpec, recorder: RunRecorder) -> None:
        self.spec, self._experience, self._recorder = spec, experience, recorder
        self._folder = recorder.folder / "checkpoints"
        self._evolution = build_evolution(
            spec.evolution, spec.search_space, spec.members, num_rounds=spec.rounds, seed=spec.seed
        )
        self.state = PopulationState(0, self._evolution.sample(), [[] for _ in range(spec.members)])
        self._stopped: list[int] = []  # before this attempt
        self._saved = self._restore()  # the learners' states; they begin with new ones where there are none
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), *_find_folders()]))}
        self.members = [
            LoopMember(
                number,
                spec.make_member_spec(number, values),
                experience,
                _get_member_folder(recorder.folder, number),
                spec.actors,
                variables,
            )
            for number, values in enumerate(self.state.values)
        ]

    def run(self) -> None:
        """To the last round. An interruption loses the present round only. Raises TrainError when no member has a
        score, RunError when a learner or an actor has failed."""
        spec, record = self.spec, self._recorder.record_event
        record(
            "population",
            step=self.state.round * spec.steps_per_round,
            members=spec.members,
            rounds=spec.rounds,
            total_steps=spec.total_steps,
            metric=spec.metric,
            is_higher_better=True,
            space=spec.search_space.describe(),
            device=str(self.members[0].loop.learner.algorithm.device),
            parameters=sum(each.numel() for each in self.members[0].loop.learner.model.parameters()),
            order="own",
        )
        record("engine", name=spec.algorithm.name, chunk=spec.members)
        if self._saved:
            for member, learner in zip(self.members, self._saved, strict=True):
                member.replace_state(learner)
            for number in self._stopped:
                self.members[number].stop()
            record("round", **self.state.rounds[-1])  # perhaps the earlier attempt died before the event
        while self.state.round < spec.rounds:
            self._run_round()

    def _run_round(self) -> None:
        began_s, state, spec = time.monotonic(), self.state, self.spec
        self._learn()
        state.round += 1
        step, scores = state.round * spec.steps_per_round, [member.get_score() for member in self.members]
        self._record_scores(step, scores)
        details = state.describe_round(scores, step)
        best = state.find_new_best(scores, is_higher_better=True)
        if best is not None:
            state.set_best(best, scores[best], self.members[best].copy_weights())
        decisions = self._evolution.next(state.round, scores, state.values)
        self._apply(decisions)
        state.rounds.append(details | describe_decisions(decisions))
        state.seconds += time.monotonic() - began_s
        self._save()
        self._recorder.record_event("round", **state.rounds[-1])
        finite = [score for score in scores if math.isfinite(score)]
        print(f"round {state.round:3} | step {step:,} | returns {min(finite):.4g} to {max(finite):.4g}", flush=True)

    def _learn(self) -> None:
        """Until each member's round is over; those that are over earlier wait for the others."""
        spec = self.spec
        starts = [member.loop.gateway.stats()["steps"] for member in self.members]
        for member in self.members:
            member.begin_round(spec.steps_per_round, spec.min_episodes)
        began_s, recorded_s, waiting = time.monotonic(), 0.0, list(self.members)
        while waiting:
            waiting = [member for member in waiting if not member.poll()]
            if time.monotonic() >= recorded_s + RECORD_S or not waiting:
                recorded_s = time.monotonic()
                ends = [member.loop.gateway.stats()["steps"] for member in self.members]
                done = [end - start for start, end in zip(starts, ends, strict=True)]
                mean = min(float(spec.steps_per_round), sum(done) / len(done))
                step = self.state.round * spec.steps_per_round + mean
                speed = sum(done) / max(1e-9, time.monotonic() - began_s)
                self._recorder.log(int(step), {"train/step": step, "population/member_steps_per_s": speed})
            if waiting:
                time.sleep(POLL_S)

    def _record_scores(self, step: int, scores: Sequence[float]) -> None:
        finite = [score for score in scores if math.isfinite(score)]
        values = {f"member/{number:02}/{self.spec.metric}": score for number, score in enumerate(scores)}
        if finite:
            values[f"validation/{self.spec.metric}"] = max(finite)
            values[f"population/mean_{self.spec.metric}"] = sum(finite) / len(finite)
        self._recorder.log(step, values)

    # -- decisions ------------------------------------------------------------------------------------------------

    def _apply(self, decisions: Decisions) -> None:
        """Copies, new weights, a restart, changes and stops, in this order; all learners pause."""
        members, state = self.members, self.state
        copied = {winner: members[winner].copy_state() for _, winner in decisions.copies}
        for loser, winner in decisions.copies:
            members[loser].replace_state(copied[winner])
        state.apply_descent(decisions)
        for number in decisions.fresh:
            members[number].replace_state(self._make_new_state(number))
        if decisions.restart is not None:
            self._restart(decisions.restart)
        for number, values in decisions.changes.items():
            state.values[number] = dict(values)
            members[number].configure(self.spec.make_member_spec(number, values))
        for number in decisions.stopped:
            members[number].stop()

    def _make_new_state(self, number: int) -> dict[str, Any]:
        """Others for each round and member."""
        with preserve_rng((self.spec.seed + (self.state.round << 32) + number) % 2**63):
            return self.members[number].make_new_state()

    def _restart(self, restart: Restart) -> None:
        for number in restart.members:
            old, new = self.members[number].copy_state(), self._make_new_state(number)
            self.members[number].replace_state(shrink_and_perturb(old, new, restart.shrink, restart.perturb))

    # -- state ----------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        names = ("round", "values", "ancestors", "rounds", "best", "seconds")
        saved = {
            **{name: getattr(self.state, name) for name in names},
            "evolution": self._evolution.state_dict(),
            "learners": [member.copy_state() for member in self.members],
            "stopped": [member.number for member in self.members if member.is_stopped],
        }
        step = self.state.round * self.spec.steps_per_round
        checkpoint.save(self._folder, step, saved, self.spec.keep_checkpoints)

    def _restore(self) -> list[dict[str, Any]]:
        """The learners' states of the last round; none before the first. Restores everything else."""
        found = checkpoint.load_latest(self._folder)
        if found is None:
            if self.spec.resume:
                self._recorder.record_event(NO_CHECKPOINT)
            return []
        saved = dict(found.state)
        learners: list[dict[str, Any]] = saved.pop("learners")
        self._evolution.load_state_dict(saved.pop("evolution"))
        self._stopped = saved.pop("stopped")
        self.state = PopulationState(**saved)
        self._recorder.record_event("restored", step=found.step, damaged=found.damaged)
        return learners


def _find_folders() -> list[str]:
    """Where this process finds modules that are not installed: an environment's may be there."""
    return [each for each in sys.path if each and not each.startswith((sys.prefix, sys.base_prefix))]


def _get_member_folder(folder: Path, number: int) -> Path:
    return folder / f"member-{number:02}"


def _finish(population: RLPopulation, experience: ExperienceSpec, recorder: RunRecorder) -> None:
    """Register the best policy of any round, with its schedule of hyper-parameters, and record how the run ended."""
    spec, state = population.spec, population.state
    best: Mapping[str, Any] = state.best
    chosen = {key: value for key, value in best.items() if key != "weights"}
    metrics = {spec.metric: float(best["score"])}
    recorder.record_event("evolved", metrics=metrics, **chosen)
    found = f"member {best['member']} of round {best['round']} is best"
    detail = f"{spec.rounds} rounds of {spec.members} learners, {found}"
    if spec.model_name:
        ancestry = Lineage(state.rounds).trace_ancestry(best["member"], best["round"])
        schedule = [
            {"member": each.member, "first_round": each.begin + 1, "last_round": each.end, **each.values}
            for each in ancestry
        ]
        member_spec = spec.make_member_spec(best["member"], best["hyper_parameters"])
        factory, signature = describe_policy_model(member_spec, experience)
        tensors = {name: tensor.numpy(force=True) for name, tensor in best["weights"].items()}
        version = Registry().register(
            spec.model_name,
            WeightSnapshot.of(best["round"] * spec.steps_per_round, tensors),
            model=factory,
            signature=signature,
            run_id=recorder.id,
            metrics=metrics,
            lineage={"member": best["member"], "round": best["round"], "schedule": schedule},
            aliases=spec.aliases,
        )
        recorder.record_model(version.name, version.version, version.aliases)
    recorder.record_event(
        "trained",
        reason="rounds",
        detail=detail,
        steps=spec.total_steps,
        kept=best["round"] * spec.steps_per_round,
        seconds=state.seconds,
        metrics=metrics,
    )
    print(f"run {recorder.id}: {detail}; {spec.metric} {best['score']:.4g}", flush=True)
