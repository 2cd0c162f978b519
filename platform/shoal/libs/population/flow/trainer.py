"""The members of a Task between rounds: trained and scored together, copied and changed in place.

Owns the data and the members. Called by `run`, which has the Task, the record and the registry. Imports no Ray, starts
no process.
Legend: K members, B samples of a batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.extend.data import Data, Loader, make_loader
from shoal.extend.train import BatchStream, EventLog, Task, build_model
from shoal.libs.population.flow.build import Values, build_network, build_population
from shoal.libs.population.flow.rounds import PopulationRun
from shoal.libs.population.lineage import rank_members
from shoal.libs.population.objective import stack_trees
from shoal.libs.population.population import Population
from shoal.libs.population.spec import PopulationSpec
from shoal.random_state import seed_everything

if TYPE_CHECKING:
    from shoal.libs.population.flow.ray_members import RayMembers

STEPS_AT_ONCE = 50  # of each member, between two reports; their batches are in memory together


class PopulationTrainer(PopulationRun[PopulationSpec]):
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
        make_members: Callable[[Values], RayMembers] | None = None,
    ) -> None:
        super().__init__(spec, folder, log)
        self.task = task
        self.data = data
        self.device = device
        seed_everything(spec.seed)
        self.population: Population | RayMembers = (
            build_population(spec, task, device, self.state.values)
            if make_members is None
            else make_members(self.state.values)
        )
        self._num_parameters = sum(each.numel() for each in build_network(spec, task).parameters())
        self._loaders = [
            make_loader(data, "train", batch_size=spec.batch_size, is_even=True, seed=spec.seed + index, device=device)
            for index in range(spec.members if spec.order == "own" else 1)
        ]
        self._streams = [BatchStream(loader) for loader in self._loaders]
        self._is_engine_reported = False

    def describe_members(self) -> dict[str, Any]:
        device = self.spec.device if self.spec.device != "auto" else str(self.device)  # the members'
        return {"device": device, "parameters": self._num_parameters, "order": self.spec.order}

    # -- a round --------------------------------------------------------------------------------------------------

    def train_round(self, step: int) -> tuple[list[float], dict[str, float]]:
        self._train(step)
        metrics = self._evaluate_members()
        measured = torch.where(metrics["loss"].isfinite(), metrics[self.spec.metric], torch.nan)
        measured[self.population.find_failed()] = torch.nan  # whatever they answer: NaNs still have an accuracy
        scores: list[float] = measured.tolist()
        best = rank_members(scores, self.spec.is_higher_better)[0]
        return scores, {name: float(each[best]) for name, each in metrics.items()}

    def _train(self, end: int) -> None:
        """The steps of one round."""
        step = end - self.spec.steps_per_round
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
            if not self._is_engine_reported:  # what computes the members, and why nothing else does
                self._is_engine_reported = True
                if choice := self.population.choice:
                    trials = [[each.engine, each.chunk, each.ms] for each in choice.trials]
                    reasons = dict(choice.reasons)
                    self._log.record_event(
                        "engine", name=choice.engine, chunk=choice.chunk, reasons=reasons, trials=trials
                    )

    def _next_batch(self) -> Any:
        """[B, ...] for all members, or [K, B, ...] where the order is own."""
        batches = [stream.next() for stream in self._streams]
        return batches[0] if self.spec.order == "shared" else stack_trees(batches)

    def _evaluate_members(self) -> dict[str, Tensor]:
        """The loss and the metrics of each member over what scores them, {name: [K]}."""
        limit = self.spec.score_samples
        with self.make_validation_loader() as loader:
            batches = loader if limit is None else islice(loader, math.ceil(limit / self.spec.evaluation_batch_size))
            return self.population.evaluate(batches)

    # -- decisions ------------------------------------------------------------------------------------------------

    def begin_afresh(self, member: int) -> None:
        model = build_model(self.task, self.spec.task)
        self.population.load_member(member, model.to(self.device).state_dict())

    # -- state ----------------------------------------------------------------------------------------------------

    def save_members(self) -> dict[str, Any]:
        positions = [loader.state_dict() for loader in self._loaders]
        return {"population": self.population.state_dict(), "data": positions}

    def load_members(self, saved: dict[str, Any]) -> None:
        self.population.load_state_dict(saved["population"])
        for loader, position in zip(self._loaders, saved["data"], strict=True):
            loader.load_state_dict(position)

    def make_validation_loader(self) -> Loader:
        """Every validation sample once, in order."""
        return make_loader(self.data, "validation", batch_size=self.spec.evaluation_batch_size, device=self.device)

    def close(self) -> None:
        """End the loaders and the threads. Idempotent."""
        for loader in self._loaders:
            loader.close()
        self.population.close()
