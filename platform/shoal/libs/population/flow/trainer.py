"""The rounds of a population: train, score, evolve, save; the same whether it begins or goes on.

    restore ► (steps ► scores ► decisions ► copies and changes ► checkpoint ► record) for each round ► outcome

Owns the order of events, the data and the state between rounds. Called by `run`, which has the Task, the
record and the registry. Imports no Ray, starts no process.
Legend: K members, B samples of a batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal import checkpoint
from shoal.batch_tree import map_tensors, tensors_of
from shoal.data import Data, Loader
from shoal.libs.population.evolution import ARCHITECTURE, Decisions, Restart, build_evolution
from shoal.libs.population.flow.build import MemberSet, Values, build_network, build_population, make_member_tasks
from shoal.libs.population.flow.state import PopulationState, describe_decisions, rank_members
from shoal.libs.population.spec import PopulationSpec
from shoal.random_state import preserve_rng, seed_everything
from shoal.runs.report.event_messages import NO_CHECKPOINT
from shoal.search.space import SearchSpace
from shoal.train.loop.components import BatchStream
from shoal.train.reporting.event_log import EventLog
from shoal.train.task import Task, build_model

STEPS_AT_ONCE = 50  # of each member, between two reports; their batches are in memory together
State = dict[str, Tensor]


class PopulationTrainer:
    """Trains and evolves the members of a Task.

    folder:       of the run; it has the checkpoints, and training continues from the newest good one
    make_members: from the values of the space that each begins with; None: all of them in this process
    """

    def __init__(
        self,
        spec: PopulationSpec,
        task: Task,
        data: Data,
        device: torch.device,
        folder: Path,
        log: EventLog,
        make_members: Callable[[Values], MemberSet] | None = None,
    ) -> None:
        self.spec, self.task, self.data, self.device, self._log = spec, task, data, device, log
        self._folder = folder / "checkpoints"
        self._space = SearchSpace.parse(spec.space)
        self._evolution = build_evolution(
            spec.evolution, self._space, spec.members, num_rounds=spec.rounds, seed=spec.seed
        )
        self.state = PopulationState(0, self._evolution.sample(), [[] for _ in range(spec.members)])
        seed_everything(spec.seed)
        self.population: MemberSet = (
            build_population(spec, task, device, self.state.values)
            if make_members is None
            else make_members(self.state.values)
        )
        self._tasks = make_member_tasks(spec, self.state.values) if spec.has_architectures else [task] * spec.members
        templates = {id(each): build_network(spec, each) for each in self._tasks}
        self._trained = {
            key: {name for name, each in network.named_parameters() if each.requires_grad}
            for key, network in templates.items()
        }
        self._num_parameters = max(sum(each.numel() for each in one.parameters()) for one in templates.values())
        num_streams = spec.members if spec.order == "own" else 1
        self._loaders = [self._make_loader(spec.seed + index) for index in range(num_streams)]
        self._streams = [BatchStream(loader) for loader in self._loaders]
        self._is_engine_reported = False

    def run(self) -> PopulationState:
        """Train to the last round. An interruption loses the present round only.

        Raises TrainError when no member has a finite score, and what the Task, the data and the disk raise.
        """
        is_restored = self._restore()
        spec = self.spec
        self._log.record_event(
            "population",
            step=self.state.round * spec.steps_per_round,
            members=spec.members,
            rounds=spec.rounds,
            total_steps=spec.total_steps,
            metric=spec.metric,
            is_higher_better=spec.is_higher_better,
            space=self._space.describe(),
            device=self.spec.device if self.spec.device != "auto" else str(self.device),  # the members'
            parameters=self._num_parameters,
            order=spec.order,
        )
        if is_restored:  # perhaps the earlier attempt died between the checkpoint and the event
            self._log.record_event("round", **self.state.rounds[-1])
        while self.state.round < spec.rounds:
            self._run_round()
        return self.state

    # -- a round --------------------------------------------------------------------------------------------------

    def _run_round(self) -> None:
        began_s = time.monotonic()
        self._train()
        metrics = self._score()
        state = self.state
        state.round += 1
        scores = self._find_scores(metrics)
        self._log.log(state.round * self.spec.steps_per_round, self._summarize(metrics, scores))
        details = state.describe_round(scores, state.round * self.spec.steps_per_round)
        self._remember_best(scores)
        signed = scores if self.spec.is_higher_better else [-score for score in scores]
        decisions = self._evolution.next(state.round, signed, state.values)
        self._apply(decisions)
        state.rounds.append(details | describe_decisions(decisions))
        state.seconds += time.monotonic() - began_s
        self._log.flush()
        self._save()
        self._log.record_event("round", **state.rounds[-1])

    def _train(self) -> None:
        """The steps of one round."""
        spec, step = self.spec, self.state.round * self.spec.steps_per_round
        end = step + spec.steps_per_round
        while step < end:
            began_s, count = time.monotonic(), min(STEPS_AT_ONCE, end - step)
            batches = [self._next_batch() for _ in range(count)]
            losses = torch.cat([each.losses.mean(0).cpu() for each in self.population.train(batches)])
            step += count
            finite = losses[losses.isfinite()]
            values = {
                "train/step": step,
                "train/loss": float(finite.mean()) if len(finite) else math.nan,
                "population/member_steps_per_s": len(losses) * count / (time.monotonic() - began_s),
            }
            self._log.log(step, values)
            self._report_engine()

    def _report_engine(self) -> None:
        """Once: what computes the members, and why nothing else does."""
        if self._is_engine_reported:
            return
        self._is_engine_reported = True
        for choice in filter(None, self.population.choices):
            reasons, trials = dict(choice.reasons), [[each.engine, each.chunk, each.ms] for each in choice.trials]
            self._log.record_event("engine", name=choice.engine, chunk=choice.chunk, reasons=reasons, trials=trials)

    def _next_batch(self) -> Any:
        """[B, ...] for all members, or [K, B, ...] where the order is own."""
        batches = [stream.next() for stream in self._streams]
        return batches[0] if self.spec.order == "shared" else _stack(batches)

    def evaluate(self) -> dict[str, Tensor]:
        """The loss and the metrics of each member over all validation data, {name: [K]}."""
        with self.make_validation_loader() as loader:
            return self.population.evaluate(loader)

    def _score(self) -> dict[str, Tensor]:
        limit = self.spec.score_samples
        if limit is None:
            return self.evaluate()
        with self.make_validation_loader() as loader:
            return self.population.evaluate(islice(loader, math.ceil(limit / self.spec.evaluation_batch_size)))

    def _find_scores(self, metrics: Mapping[str, Tensor]) -> list[float]:
        """NaN for members that have failed, whatever they answer: a network of NaNs still has an accuracy."""
        scores = torch.where(metrics["loss"].isfinite(), metrics[self.spec.metric], torch.nan)
        scores[self.population.find_failed()] = torch.nan
        found: list[float] = scores.tolist()
        return found

    def _remember_best(self, scores: Sequence[float]) -> None:
        """Of all rounds: a restart may leave every later member worse."""
        member = self.state.find_new_best(scores, is_higher_better=self.spec.is_higher_better)
        if member is not None:
            self.state.set_best(member, scores[member], self.population.member_state_dict(member))

    def _summarize(self, metrics: Mapping[str, Tensor], scores: Sequence[float]) -> dict[str, float]:
        """The best member's metrics, the mean score, and each member's."""
        best = rank_members(scores, self.spec.is_higher_better)[0]
        finite = [score for score in scores if math.isfinite(score)]
        values = {f"validation/{name}": float(each[best]) for name, each in metrics.items()}
        values[f"population/mean_{self.spec.metric}"] = sum(finite) / len(finite) if finite else math.nan
        return values | {f"member/{member:02}/{self.spec.metric}": score for member, score in enumerate(scores)}

    # -- decisions ------------------------------------------------------------------------------------------------

    def _apply(self, decisions: Decisions) -> None:
        """Copies, new weights, a restart, changes and stops, in this order."""
        state, population = self.state, self.population
        population.exploit(decisions.copies)
        state.apply_descent(decisions)
        for member in decisions.fresh:
            population.load_member(member, self._make_weights(member))
        if decisions.restart is not None:
            self._shrink_and_perturb(decisions.restart)
        for member, values in decisions.changes.items():
            state.values[member] = dict(values)
            population.set_hyper_parameters(member, _to_numbers(values))
        for member in decisions.stopped:
            population.retire(member)

    def _make_weights(self, member: int) -> State:
        """New weights, others for each round and member."""
        with preserve_rng((self.spec.seed + (self.state.round << 32) + member) % 2**63):
            return build_model(self._tasks[member], self.spec.task).to(self.device).state_dict()

    def _shrink_and_perturb(self, restart: Restart) -> None:
        """shrink * old + perturb * new for parameters (1910.08475, section 4); buffers stay."""
        for member in restart.members:
            new, state = self._make_weights(member), self.population.member_state_dict(member)
            for name in self._trained[id(self._tasks[member])]:
                state[name] = restart.shrink * state[name] + restart.perturb * new[name]
            self.population.load_member(member, state)

    # -- state ----------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        names = ("round", "values", "ancestors", "rounds", "best", "seconds")
        state = {
            **{name: getattr(self.state, name) for name in names},
            "population": self.population.state_dict(),
            "evolution": self._evolution.state_dict(),
            "data": [loader.state_dict() for loader in self._loaders],
        }
        step = self.state.round * self.spec.steps_per_round
        checkpoint.save(self._folder, step, state, self.spec.keep_checkpoints)

    def _restore(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        found = checkpoint.load_latest(self._folder)
        if found is None:
            if self.spec.resume:
                self._log.record_event(NO_CHECKPOINT)
            return False
        state = found.state
        self.population.load_state_dict(state.pop("population"))
        self._evolution.load_state_dict(state.pop("evolution"))
        for loader, position in zip(self._loaders, state.pop("data"), strict=True):
            loader.load_state_dict(position)
        self.state = PopulationState(**state)
        self._log.record_event("restored", step=found.step, damaged=found.damaged)
        return True

    # -- parts ----------------------------------------------------------------------------------------------------

    def _make_loader(self, seed: int) -> Loader:
        return Loader(
            self.data.train,
            batch_size=self.spec.batch_size,
            seed=seed,
            device=self.device,
            collate=self.data.collate,
        )

    def make_validation_loader(self) -> Loader:
        """Every validation sample once, in order."""
        return Loader(
            self.data.validation,
            batch_size=self.spec.evaluation_batch_size,
            device=self.device,
            collate=self.data.collate,
            shuffle=False,
            drop_last=False,
        )

    def get_scores(self) -> list[float]:
        """Of each member, after the last round; NaN for those without one."""
        return [math.nan if score is None else score for score in self.state.rounds[-1]["scores"]]

    def close(self) -> None:
        """End the loaders and the threads. Idempotent."""
        for loader in self._loaders:
            loader.close()
        self.population.close()


def _to_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The hyper-parameters; an architecture never changes."""
    return {path: float(value) for path, value in values.items() if not path.startswith(ARCHITECTURE)}


def _stack(batches: Sequence[Any]) -> Any:
    """Batches [B, ...] of each member as one [K, B, ...]."""
    columns = zip(*(tensors_of(batch) for batch in batches), strict=True)
    stacked = iter([torch.stack(column) for column in columns])
    return map_tensors(batches[0], lambda _: next(stacked))
