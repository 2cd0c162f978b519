"""A population of learners as a run: rounds of learning in place, and the best policy registered.

Called by `jobs/rl_population.py`, and by tests without a cluster: nothing here needs Ray but `rl_population_main`. All
learners are threads of this process; actors are processes. `rounds` has the order of events.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from shoal.extend.cluster import job_main
from shoal.extend.flows import describe_experience, describe_policy_model, inspect_environment, recorded_run
from shoal.extend.runs import RunRecorder, format_number, print_line
from shoal.extend.train import RecordLog
from shoal.libs.population.evolution import build_evolution
from shoal.libs.population.flow.rounds import (
    PopulationRun,
    RoundLog,
    choose_spec,
    require_continuation,
)
from shoal.libs.population.loop.members import LoopMember, LoopMembers
from shoal.libs.population.loop.spec import RLPopulationSpec, require_members
from shoal.weights import WeightSnapshot
from shoal.wire import ExperienceSpec

JOB = "rl_population"
POLL_S = 0.1
RECORD_S = 1.0
UNCHANGED = ("env", "ignore", "normalize_observations", "normalize_rewards", "algorithm", "hidden", "members", "space",
             "evolution", "steps_per_round", "seed")  # fmt: skip


def rl_population_main(recipe: RLPopulationSpec) -> None:
    """The main function of jobs/rl_population.py."""
    job_main(partial(choose_spec, recipe), run_rl_population, JOB, check_rl_population)


def check_rl_population(spec: RLPopulationSpec) -> ExperienceSpec:
    """Raises ConfigError with field, value and remedy for a run that could not work, SpecMismatch for another run's."""
    if spec.resume:
        require_continuation(spec, UNCHANGED)
    require_members(spec)
    build_evolution(spec.evolution, spec.search_space, spec.members, num_rounds=spec.rounds)
    experience, _ = inspect_environment(spec)
    return experience


def run_rl_population(spec: RLPopulationSpec, job: str = JOB) -> str:
    """Learn and evolve to the end, register the best policy, and return the run's id. Raises a ShoalError."""
    experience = check_rl_population(spec)
    with recorded_run(spec, job, "population") as recorder:
        print_line(f"run {recorder.id}: {spec.members} learners of {spec.env}")
        with ExitStack() as opened:
            population = RLPopulation(spec, experience, recorder)
            for member in population.members:
                opened.enter_context(member)
            population.run()
        population.finish(recorder)
    return recorder.id


class RLPopulation(PopulationRun[RLPopulationSpec]):
    """The members and the rounds. The members are entered before `run`, and exited after it."""

    def __init__(self, spec: RLPopulationSpec, experience: ExperienceSpec, recorder: RunRecorder) -> None:
        super().__init__(spec, recorder.folder, RoundLog(RecordLog(recorder), "returns"))
        self._experience = experience
        self._is_engine_reported = False
        self.members = [
            LoopMember(
                number,
                spec.make_member_spec(number, values),
                experience,
                recorder.folder / f"member-{number:02}",
                spec.actors,
            )
            for number, values in enumerate(self.state.values)
        ]
        self.population = LoopMembers(spec, self.members)

    def describe_members(self) -> dict[str, Any]:
        learner = self.members[0].loop.learner
        parameters = sum(each.numel() for each in learner.model.parameters())
        return {"device": str(learner.algorithm.device), "parameters": parameters, "order": "own"}

    def train_round(self, step: int) -> tuple[list[float], dict[str, float]]:
        self._learn(step - self.spec.steps_per_round)
        scores = [member.get_score() for member in self.members]
        return scores, {self.spec.metric: max(filter(math.isfinite, scores), default=math.nan)}

    def _learn(self, first_step: int) -> None:
        """Learn until each member's round is over; those that are over earlier wait for the others."""
        spec = self.spec
        if not self._is_engine_reported:
            self._is_engine_reported = True
            self._log.record_event("engine", name=spec.algorithm.name, chunk=spec.members)
        starts = [member.loop.gateway.stats()["steps"] for member in self.members]
        for member in self.members:
            member.begin_round(spec.steps_per_round, spec.min_episodes)
        began_s = time.monotonic()
        recorded_s = 0.0
        waiting = list(self.members)
        while waiting:
            waiting = [member for member in waiting if not member.poll()]
            if time.monotonic() >= recorded_s + RECORD_S or not waiting:
                recorded_s = time.monotonic()
                ends = [member.loop.gateway.stats()["steps"] for member in self.members]
                done = [end - start for start, end in zip(starts, ends, strict=True)]
                step = first_step + min(float(spec.steps_per_round), sum(done) / len(done))
                speed = sum(done) / max(1e-9, time.monotonic() - began_s)
                self._log.log(int(step), {"train/step": step, "population/member_steps_per_s": speed})
            if waiting:
                time.sleep(POLL_S)

    # -- decisions: all learners pause ------------------------------------------------------------------------------

    def begin_afresh(self, member: int) -> None:
        learner = self.members[member]
        learner.replace_state(learner.make_new_state())

    # -- state ----------------------------------------------------------------------------------------------------

    def save_members(self) -> dict[str, Any]:
        stopped = [member.number for member in self.members if member.is_stopped]
        return {"learners": [member.copy_state() for member in self.members], "stopped": stopped}

    def load_members(self, saved: dict[str, Any]) -> None:
        for member, state in zip(self.members, saved["learners"], strict=True):
            member.replace_state(state)
        for number in saved["stopped"]:
            self.population.retire(number)

    def finish(self, recorder: RunRecorder) -> None:
        """Register the best policy of any round, with its schedule of hyper-parameters, and record how the run
        ended."""
        spec, best = self.spec, self.state.best
        metrics = {spec.metric: float(best["score"])}
        self.record_best(metrics)
        if spec.model_name:
            member_spec = spec.make_member_spec(best["member"], best["hyper_parameters"])
            factory, signature = describe_policy_model(member_spec, self._experience)
            tensors = {name: tensor.numpy(force=True) for name, tensor in best["weights"].items()}
            self.register(
                recorder,
                spec.model_name,
                WeightSnapshot.of(best["round"] * spec.steps_per_round, tensors),
                model=factory,
                signature=signature,
                metrics=metrics,
                data={"environment": spec.env},
                lineage=self.trace_best(),
                files=describe_experience(self._experience),
            )
        detail = self.record_end("learners", metrics)
        print_line(f"run {recorder.id}: {detail}; {spec.metric} {format_number(best['score'])}")
