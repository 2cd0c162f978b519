"""One population over several Ray workers: each holds a share of the members, rows travel through the object store.

A member is what it would be in one process: shares have its seed, its generator and its batches. That one copies a
member of another worker is one object: the winner's row, from worker to worker, without a file. Called by `run` where
the spec has more than one worker, or members on a GPU. The workers decide nothing.
Legend: K members, k of a share.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shoal.batch_tree import map_tensors
from shoal.cpu_count import count_usable_cores
from shoal.errors import RankLost, SpecMismatch
from shoal.extend.parallel import choose_device
from shoal.extend.train import make_task
from shoal.libs.population.engines.select_engine import EngineChoice
from shoal.libs.population.flow.build import Values, build_population, divide_members
from shoal.libs.population.population import ChunkResult, Population
from shoal.libs.population.spec import PopulationSpec

Row = dict[str, Tensor]


class MemberShare:
    """A worker: consecutive members of the population, named by their numbers in it."""

    def __init__(self, spec: PopulationSpec, values: Values, first: int, folder: Path) -> None:
        if folder.is_dir():  # else this is another host, where Ray has chosen the folder with the job's files
            os.chdir(folder)
        torch.set_num_threads(1)
        self._first = first
        device = choose_device(spec.device, 0)
        threads = max(1, count_usable_cores() // spec.workers)
        self._members: Population = build_population(
            spec, make_task(spec.task, spec.args), device, values, first, threads
        )

    def train(self, batches: Sequence[Any]) -> list[ChunkResult]:
        """The losses of all steps."""
        results = self._members.train(batches)
        return [ChunkResult(tuple(self._first + each for each in one.members), one.losses.cpu()) for one in results]

    def call(self, name: str, *arguments: Any) -> Any:
        """A method of the share, or a property."""
        attribute = getattr(self._members, name)
        return attribute(*arguments) if callable(attribute) else attribute

    def state_dict(self) -> dict[str, Any]:
        """Return the share's, in host memory: who gets it may have no GPU."""
        state: dict[str, Any] = tree_map_only(Tensor, Tensor.cpu, self._members.state_dict())
        return state

    def get_row(self, member: int) -> Row:
        """Everything of a member but its hyper-parameters and its generator, in host memory."""
        group = self._members.group
        row = group.find_row(member - self._first)
        return {name: rows[row].cpu().clone() for name, rows in group.rows.state().items()}  # a view is sent whole

    def set_row(self, member: int, source: Row) -> None:
        """What `get_row` gave, of another worker perhaps. A retired member is trained again."""
        group = self._members.group
        group.set_active(member - self._first, True)
        row = group.find_row(member - self._first)
        for name, rows in group.rows.state().items():
            rows[row].copy_(source[name])


class RayMembers:
    """The members of all workers, called as a Population is. Raises RankLost when a worker has died."""

    def __init__(self, spec: PopulationSpec, values: Values) -> None:
        self._shares = divide_members(spec)
        self._order = spec.order
        resources = {"num_gpus": 1} if spec.device == "cuda" else {"num_cpus": 1}
        start = ray.remote(**resources)(MemberShare).options(scheduling_strategy="SPREAD")
        self._workers = [
            start.remote(spec, list(values[share.start : share.stop]), share.start, Path.cwd())
            for share in self._shares
        ]

    @property
    def choice(self) -> EngineChoice | None:
        """The first worker's."""
        choice: EngineChoice | None = self._get([self._workers[0].call.remote("choice")])[0]
        return choice

    def train(self, batches: Iterable[Any]) -> Iterator[ChunkResult]:
        """As Population.train; yields a worker's chunks when it is ready."""
        contents = list(batches)

        def take(batch: Any, share: range) -> Any:
            return map_tensors(batch, lambda tensor: tensor[share.start : share.stop].clone())  # a view is sent whole

        shared = ray.put(contents) if self._order == "shared" else None
        waiting = [
            worker.train.remote(shared if shared is not None else [take(each, share) for each in contents])
            for worker, share in zip(self._workers, self._shares, strict=True)
        ]
        while waiting:
            ready, waiting = ray.wait(waiting)
            for results in self._get(ready):
                yield from results

    def evaluate(self, batches: Iterable[Any]) -> dict[str, Tensor]:
        """As Population.evaluate; a worker whose members are all retired answers nothing, which counts as NaN."""
        contents = ray.put(list(batches))
        measured = self._get([worker.call.remote("evaluate", contents) for worker in self._workers])
        sizes = [len(share) for share in self._shares]
        return {
            name: torch.cat(
                [each.get(name, example.new_full((n,), math.nan)) for each, n in zip(measured, sizes, strict=True)]
            )
            for name, example in next(filter(None, measured), {}).items()
        }

    def exploit(self, pairs: Iterable[tuple[int, int]]) -> None:
        """As Population.exploit: all at once, for a worker reads the rows that are asked for before it writes one."""
        pairs = list(pairs)
        rows = {winner: self._worker_of(winner).get_row.remote(winner) for _, winner in pairs}
        self._get([self._worker_of(loser).set_row.remote(loser, rows[winner]) for loser, winner in pairs])

    def retire(self, member: int) -> None:
        self._call(member, "retire")

    def set_hyper_parameters(self, member: int, values: Mapping[str, float]) -> None:
        self._call(member, "set_hyper_parameters", dict(values))

    def member_state_dict(self, member: int) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._call(member, "member_state_dict")
        return {name: tensor.cpu() for name, tensor in state.items()}

    def load_member(self, member: int, state: Mapping[str, Tensor]) -> None:
        self._call(member, "load_member", dict(state))

    def find_failed(self) -> list[int]:
        failed = self._get([worker.call.remote("find_failed") for worker in self._workers])
        return [share.start + each for share, members in zip(self._shares, failed, strict=True) for each in members]

    def state_dict(self) -> dict[str, Any]:
        """Return with one worker the state of members in this process: a later attempt may have them there."""
        shares = self._get([worker.state_dict.remote() for worker in self._workers])
        return {"shares": shares} if len(shares) > 1 else shares[0]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises SpecMismatch for the state of another number of workers."""
        shares = state.get("shares", [state])
        if len(shares) != len(self._workers):
            problem = f"the run has the state of {len(shares)} workers"
            raise SpecMismatch("workers", len(self._workers), problem, f"use workers={len(shares)}")
        loads = zip(self._workers, shares, strict=True)
        self._get([worker.call.remote("load_state_dict", share) for worker, share in loads])

    def close(self) -> None:
        """End the workers. Idempotent."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []

    def _worker_of(self, member: int) -> Any:
        return next(worker for worker, share in zip(self._workers, self._shares, strict=True) if member in share)

    def _call(self, member: int, name: str, *arguments: Any) -> Any:
        share = next(each for each in self._shares if member in each)
        return self._get([self._worker_of(member).call.remote(name, member - share.start, *arguments)])[0]

    def _get(self, references: Sequence[Any]) -> list[Any]:
        try:
            results: list[Any] = ray.get(list(references))
        except RayActorError as error:
            raise RankLost("a worker with members of the population died; the last round is saved") from error
        return results
