"""The rounds of a population, of a Task's members or of learners: what both kinds of runs have in common.

    restore ► (train ► scores ► decisions ► copies and changes ► checkpoint ► record) for each round ► register

Owns the run's record, the order of events and the state between rounds. `PopulationTrainer` and `RLPopulation` say how
members are trained, copied and changed. Imports no Ray, starts no process.
Legend: K members.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import shoal.runs
from shoal import checkpoint
from shoal.config import last_override
from shoal.errors import ConfigError, SpecMismatch
from shoal.extend.registry import Criterion, Registry
from shoal.extend.runs import NO_CHECKPOINT, RunRecorder, Status, format_number, print_line
from shoal.extend.train import ConsoleLog, EventLog
from shoal.libs.population.evolution import Decisions, build_evolution
from shoal.libs.population.lineage import Lineage, rank_members
from shoal.random_state import preserve_rng
from shoal.weights import WeightSnapshot

if TYPE_CHECKING:
    from shoal.libs.population.flow.ray_members import RayMembers
    from shoal.libs.population.loop.members import LoopMembers
    from shoal.libs.population.loop.spec import RLPopulationSpec
    from shoal.libs.population.population import Population
    from shoal.libs.population.spec import PopulationSpec

FRESH = -1  # in a line of descent: new weights, of no other member


SpecT = TypeVar("SpecT", bound="PopulationSpec | RLPopulationSpec")
EitherSpec = TypeVar("EitherSpec", "PopulationSpec", "RLPopulationSpec")


def choose_spec(recipe: EitherSpec, overrides: Sequence[str]) -> EitherSpec:
    """The resumed run's spec, or the recipe, with `overrides`.

    Raises ConfigError for a fixed value of what the space has too: it would have no effect.
    """
    resumed = last_override(overrides, "resume")
    spec = type(recipe).from_record(shoal.runs.load(resumed).spec, overrides) if resumed else recipe.override(overrides)
    for path in spec.space:
        if fixed := last_override(overrides, path):
            raise ConfigError(path, fixed, "differs from member to member, by the space", f"add space.{path}=null")
    return spec


def require_continuation(spec: PopulationSpec | RLPopulationSpec, unchanged: Sequence[str]) -> None:
    """Raise ConfigError for a run that has ended, SpecMismatch for one in which a field of `unchanged` differs."""
    before = shoal.runs.load(spec.resume)
    recorded = type(spec).from_record(before.spec)
    if before.status is Status.FINISHED and spec.rounds <= recorded.rounds:
        problem = f"has ended already, after {recorded.rounds} rounds"
        raise ConfigError("resume", before.id, problem, f"say when it ends now, as in rounds={2 * recorded.rounds}")
    for name in unchanged:
        if getattr(spec, name) != getattr(recorded, name):
            problem = f"the run has {getattr(recorded, name)!r}"
            raise SpecMismatch(name, getattr(spec, name), problem, "leave it out, or begin a new run")


class RoundLog(ConsoleLog):
    """Prints a line for each round, and every problem. scores: what its scores are called."""

    def __init__(self, log: EventLog, scores: str = "scores") -> None:
        super().__init__(log, print_line)
        self._scores = scores

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        self._event_log.log(step, values, at)

    def record_event(self, kind: str, /, **details: Any) -> None:
        super().record_event(kind, **details)
        if kind == "round":
            finite = [score for score in details["scores"] if score is not None]
            scores = f"{format_number(min(finite))} to {format_number(max(finite))}" if finite else "none finite"
            self._say(f"round {details['round']:3} | step {details['step']:,} | {self._scores} {scores}")


@dataclass
class PopulationState:
    """What a run consists of between two rounds, apart from the members' numbers. Its only tensors are the best's.

    round:     rounds that are over
    values:    of the space, for each member, in the next round
    ancestors: of each member, [round, source] of each copy in its line of descent, oldest first
    rounds:    the details of each round's event, as the record has them
    best:      the best member of any round: {round, member, score, hyper_parameters, ancestors, weights}; {} at first
    seconds:   of all rounds, over all attempts
    """

    round: int
    values: list[dict[str, Any]]
    ancestors: list[list[list[int]]]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class PopulationRun(ABC, Generic[SpecT]):
    """The rounds of one run. `state` is that of the newest good checkpoint, or of a new population.

    folder:     of the run; it has the checkpoints
    population: the members, which a subclass makes
    """

    population: Population | RayMembers | LoopMembers

    def __init__(self, spec: SpecT, folder: Path, log: EventLog) -> None:
        self.spec: SpecT = spec
        self._log, self._folder = log, folder / "checkpoints"
        self._evolution = build_evolution(
            spec.evolution, spec.search_space, spec.members, num_rounds=spec.rounds, seed=spec.seed
        )
        self.state = PopulationState(0, self._evolution.sample(), [[] for _ in range(spec.members)])
        self._saved_members: dict[str, Any] = {}  # what `save_members` gave to the checkpoint
        loaded = checkpoint.load_latest(self._folder)
        if loaded is not None:
            saved = dict(loaded.state)
            self._evolution.load_state_dict(saved.pop("evolution"))
            self.state = PopulationState(**{each.name: saved.pop(each.name) for each in fields(PopulationState)})
            self._saved_members = saved
            log.record_event("restored", step=loaded.step, damaged=loaded.damaged)
        elif spec.resume:
            log.record_event(NO_CHECKPOINT)

    # -- what a kind of members says ------------------------------------------------------------------------------

    @abstractmethod
    def describe_members(self) -> dict[str, Any]:
        """Details of the event `population`: device, parameters of a member, order of its batches."""

    @abstractmethod
    def train_round(self, step: int) -> tuple[list[float], dict[str, float]]:
        """Train all members until `step`. Returns their scores, NaN for those that have failed, and the best one's
        metrics, by name."""

    @abstractmethod
    def begin_afresh(self, member: int) -> None:
        """Give the member new weights, drawn from torch's generator."""

    @abstractmethod
    def save_members(self) -> dict[str, Any]:
        """Their part of a checkpoint."""

    @abstractmethod
    def load_members(self, saved: dict[str, Any]) -> None:
        """Go on from what `save_members` gave."""

    # -- rounds ---------------------------------------------------------------------------------------------------

    def run(self) -> PopulationState:
        """Train to the last round. An interruption loses the present round only.

        Raises TrainError when no member has a finite score, and what the members and the disk raise.
        """
        spec, state = self.spec, self.state
        saved, self._saved_members = self._saved_members, {}
        if saved:
            self.load_members(saved)
        self._log.record_event(
            "population",
            step=state.round * spec.steps_per_round,
            members=spec.members,
            rounds=spec.rounds,
            total_steps=spec.steps_per_member,
            metric=spec.metric,
            is_higher_better=spec.is_higher_better,
            space=spec.search_space.describe(),
            **self.describe_members(),
        )
        if saved:  # perhaps the earlier attempt died between the checkpoint and the event
            self._log.record_event("round", **state.rounds[-1])
        while state.round < spec.rounds:
            self._run_round()
        return state

    def _run_round(self) -> None:
        began_s, state = time.monotonic(), self.state
        step = (state.round + 1) * self.spec.steps_per_round
        scores, metrics = self.train_round(step)
        finite, name = [score for score in scores if math.isfinite(score)], self.spec.metric
        values = {f"validation/{each}": value for each, value in metrics.items()}
        values[f"population/mean_{name}"] = sum(finite) / len(finite) if finite else math.nan
        values |= {f"member/{member:02}/{name}": score for member, score in enumerate(scores)}
        self._log.log(step, values)
        state.round += 1
        details = {
            "round": state.round,
            "step": step,
            "scores": [score if math.isfinite(score) else None for score in scores],
            "hyper_parameters": {path: [values[path] for values in state.values] for path in state.values[0]},
            "ancestors": [list(map(list, each)) for each in state.ancestors],
        }
        self._remember_best(scores)
        signed = scores if self.spec.is_higher_better else [-score for score in scores]
        decisions = self._evolution.next(state.round, signed, state.values)
        self._apply(decisions)
        details["copies"] = [list(pair) for pair in decisions.copies]
        details |= {name: list(getattr(decisions, name)) for name in ("fresh", "retired", "stopped")}
        state.rounds.append(details)
        state.seconds += time.monotonic() - began_s
        self._log.flush()
        saved = {each.name: getattr(state, each.name) for each in fields(state)}
        saved |= {"evolution": self._evolution.state_dict(), **self.save_members()}
        checkpoint.save(self._folder, step, saved, self.spec.keep_checkpoints)
        self._log.record_event("round", **state.rounds[-1])

    def _remember_best(self, scores: Sequence[float]) -> None:
        """Keep the best member of all rounds: every later one may be worse."""
        is_higher_better, state = self.spec.is_higher_better, self.state
        member = rank_members(scores, is_higher_better)[0]
        score, before = scores[member], state.best.get("score")
        if not math.isfinite(score):
            return
        if before is None or (score > before if is_higher_better else score < before):
            state.best = {
                "round": state.round,
                "member": member,
                "score": score,
                "hyper_parameters": dict(state.values[member]),
                "ancestors": [list(each) for each in state.ancestors[member]],
                "weights": self.population.member_state_dict(member),
            }

    def _apply(self, decisions: Decisions) -> None:
        """Copies, new weights, changes and stops, in this order."""
        state = self.state
        population = self.population
        population.exploit(decisions.copies)
        before = [list(each) for each in state.ancestors]
        for loser, winner in decisions.copies:
            state.ancestors[loser] = [*before[winner], [state.round, winner]]
        for member in decisions.fresh:
            state.ancestors[member] = [*before[member], [state.round, FRESH]]
            with preserve_rng((self.spec.seed + (state.round << 32) + member) % 2**63):  # another for each round
                self.begin_afresh(member)
        for member, values in decisions.changes.items():
            state.values[member] = dict(values)
            population.set_hyper_parameters(member, values)
        for member in decisions.stopped:
            population.retire(member)

    def get_scores(self) -> list[float]:
        """List those of each member, after the last round; NaN for those without one."""
        return [math.nan if score is None else score for score in self.state.rounds[-1]["scores"]]

    # -- the end --------------------------------------------------------------------------------------------------

    def record_best(self, metrics: Mapping[str, float]) -> None:
        """Record the best member of any round, with its metrics."""
        best = {key: value for key, value in self.state.best.items() if key != "weights"}
        self._log.record_event("evolved", metrics=metrics, **best)

    def trace_best(self) -> dict[str, Any]:
        """The best member and its schedule, with its ancestors', oldest first: who was trained in which rounds, with
        which values."""
        best = self.state.best
        ancestry = Lineage(self.state.rounds).trace_ancestry(best["member"], best["round"])
        schedule = [
            {"member": each.member, "first_round": each.begin + 1, "last_round": each.end, **each.values}
            for each in ancestry
        ]
        return {"member": best["member"], "round": best["round"], "schedule": schedule}

    def register(self, recorder: RunRecorder, name: str, snapshot: WeightSnapshot, **entry: Any) -> None:
        """Register weights as the next version of `name`, and record that. entry: further arguments of the registry."""
        spec = self.spec
        entry |= {"aliases": spec.aliases, "criterion": Criterion(spec.metric, spec.is_higher_better)}
        version = Registry().register(name, snapshot, run_id=recorder.id, **entry)
        recorder.record_model(version.name, version.version, version.aliases, version.decision)
        if version.problem:
            self._log.record_event("unservable", model=version.ref, error=version.problem)

    def record_end(self, members: str, metrics: Mapping[str, float]) -> str:
        """Record how the run ended, and return it in words. members: what they are called."""
        spec, best = self.spec, self.state.best
        best_one = f"member {best['member']} of round {best['round']} is best"
        detail = f"{spec.rounds} rounds of {spec.members} {members}, {best_one}"
        self._log.record_event(
            "trained",
            reason="rounds",
            detail=detail,
            steps=spec.steps_per_member,
            kept=best["round"] * spec.steps_per_round,
            seconds=self.state.seconds,
            metrics=metrics,
        )
        return detail
