"""How a model and its batch are split: the user's spec, and the degrees that follow from it.

Owns the preset names (`ddp`, `fsdp`, ...), the arithmetic of degrees and workers, and the layout of ranks. Called by
TrainSpec, by the CLI and by `parallelize`. Knows no model and no process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from shoal.config import Spec
from shoal.errors import PlanError, suggest

# The degrees of each preset; an open degree follows from the number of workers.
PLAN_PRESETS: dict[str, dict[str, Any]] = {
    "single": {"data": 1},
    "ddp": {},
    "fsdp": {"shard": True},
    "hybrid": {"shard": True, "replicate": "hosts"},
    "tensor": {"data": 1, "tensor": None},
    "pipeline": {"data": 1, "pipeline": None},
}
Precision = Literal["fp32", "bf16", "bf16_params", "fp16"]
ActivationCheckpointing = Literal["none", "block", "selective"]
Copies = Annotated[int, Field(ge=1)]
ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]


class Coordinates(NamedTuple):
    """A rank's coordinates: its stage, its share of the batch, its part of each layer."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class ParallelDims:
    """A plan with all degrees known; their product is the number of workers.

    data:      shares of the global batch
    replicate: the number of groups among them with a full (sharded) copy; data // replicate ranks share one copy
    shard:     whether the ranks of a copy have a part of each parameter (FSDP) or all of it (DDP)
    tensor:    ranks that split layers
    pipeline:  stages
    """

    data: int = 1
    replicate: int = 1
    shard: bool = False
    tensor: int = 1
    pipeline: int = 1

    @property
    def workers(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def is_sharded(self) -> bool:
        """Whether data ranks have parts of each parameter instead of full copies."""
        return self.shard and self.data > self.replicate

    def coordinates(self, rank: int) -> Coordinates:
        """Tensor ranks are neighbours, then data, then stages: those that communicate most are closest."""
        tensor, rest = rank % self.tensor, rank // self.tensor
        return Coordinates(rest // self.data, rest % self.data, tensor)

    def rank(self, at: Coordinates) -> int:
        return (at.pipeline * self.data + at.data) * self.tensor + at.tensor

    def peers(self, rank: int, axis: Literal["pipeline", "data", "tensor"]) -> list[int]:
        """The ranks that differ from `rank` only along `axis`, itself included, in order."""
        at = self.coordinates(rank)
        size: int = getattr(self, axis)
        return [self.rank(at._replace(**{axis: index})) for index in range(size)]

    @property
    def description(self) -> str:
        """A short form of the plan, for tables and records: `data 2 x tensor 2`."""
        names = [("data", self.data), ("tensor", self.tensor), ("pipeline", self.pipeline)]
        parts = [f"{name} {size}" for name, size in names if size > 1]
        if self.shard and self.data > 1:
            parts[0] += " sharded" if self.replicate == 1 else f" ({self.replicate} copies, sharded)"
        return " x ".join(parts) or "single"


class ParallelSpec(Spec):
    """How to run on several workers: a preset's name, or degrees that compose.

    An open degree follows from the number of workers (`data` first).

    data:          shares of the batch; None: the workers that the other degrees leave
    shard:         the data ranks share weights, gradients and the optimiser's states (FSDP2)
    tensor:        ranks that split single layers, by a plan that is found, or by the Task's `tensor_plan`
    pipeline:      stages, divided by measured cost, or by the Task's `pipeline_cuts`
    compile:       torch.compile
    replicate:     copies of the model among the data ranks when sharded; hosts: one in each host (HSDP)
    accumulate:    micro-steps in each step of the optimiser
    precision:     of the computation; the optimiser's weights and the sums of gradients stay in fp32. bf16 and fp16
                   cast the inputs of single operations; bf16_params, for sharded plans, gathers the weights in bf16
    activation_checkpointing: what a layer of a list or a sequence keeps for the backward pass, which recomputes the
                   rest: everything (none), its inputs (block), or its products and attention too (selective)
    reshard_after_forward: whether sharded weights are freed between forward and backward pass; auto: those of blocks
    offload:       what of the shards is in the host's memory: all has weights, gradients and the optimiser's states
                   there, and blocks on the GPU while they compute
    channels_last: whether convolutions get images as [B, H, W, C] in memory, which is often faster
    dynamic:       the used parameters may differ between steps (skipped layers, experts): replicas then check each step
    backend:       of the process group; None: nccl on CUDA, otherwise gloo, and shared memory within a host
    schedule:      of the pipeline, see torch.distributed.pipelining
    micro_batches: into which the pipeline splits a batch; None: two for each stage
    """

    data: int | None = Field(default=None, ge=1)
    replicate: Copies | Literal["hosts"] = 1
    shard: bool = False
    tensor: int | None = Field(default=1, ge=1)
    pipeline: int | None = Field(default=1, ge=1)
    accumulate: int = Field(default=1, ge=1)
    precision: Precision = "fp32"
    activation_checkpointing: ActivationCheckpointing = "none"
    reshard_after_forward: bool | Literal["auto"] = "auto"
    offload: Literal["none", "all"] = "none"
    compile: bool = False
    channels_last: bool = False
    dynamic: bool = False
    backend: str | None = None
    schedule: ScheduleName = "1f1b"
    micro_batches: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _parse_preset(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value not in PLAN_PRESETS:
            raise ValueError(
                f"no such plan; the words are {', '.join(PLAN_PRESETS)}, or give degrees such as {{tensor: 2}}"
                f"{(near := suggest(value, PLAN_PRESETS)) and f'; {near}'}"
            )
        return PLAN_PRESETS[value]

    @classmethod
    def from_override(cls, text: str, before: Mapping[str, Any]) -> object:
        """The preset sets all degrees; the other fields (precision, compile, ...) stay."""
        if text not in PLAN_PRESETS:
            return text
        return {
            **before,
            **{each.name: cls.model_fields[each.name].default for each in fields(ParallelDims)},
            **PLAN_PRESETS[text],
        }

    def resolve_dims(self, workers: int, ranks_per_host: int | None = None) -> ParallelDims:
        """All degrees, for so many workers. Raises PlanError when they do not multiply to that number.

        ranks_per_host: which are neighbours; None before it is known: `replicate=hosts` then counts as one host
        """
        given: dict[str, int | None] = {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}
        known = 1
        for size in given.values():
            known *= size or 1
        unknown = [name for name, size in given.items() if size is None]
        if workers % known or (not unknown and known != workers):
            product = " x ".join(f"{name} {size}" for name, size in given.items() if size is not None) or "the plan"
            remedy = f"use a multiple of {known}, or other degrees" if unknown else f"use workers={known}"
            raise PlanError("workers", workers, f"does not fit {product}", remedy)
        for name in unknown:  # the first open degree takes the remaining factor
            given[name] = workers // known
            known = workers
        data = given["data"] or 1
        tensor = given["tensor"] or 1
        replicate = _count_copies(data, tensor, ranks_per_host) if self.replicate == "hosts" else self.replicate
        if data % replicate:
            problem = f"{data} data ranks cannot form {replicate} equal copies"
            raise PlanError("parallel.replicate", replicate, problem, "let it divide the number of data ranks")
        return ParallelDims(data, replicate, self.shard, tensor, given["pipeline"] or 1)

    def compute_micro_batch_size(self, batch_size: int, degrees: ParallelDims) -> int:
        """Samples of each micro-step on one data rank. Raises PlanError unless the global batch divides evenly."""
        micro = self.num_micro_batches(degrees)
        parts = degrees.data * self.accumulate * micro
        if batch_size % parts:
            made_of: Mapping[str, int] = {"data": degrees.data, "accumulate": self.accumulate, "micro_batches": micro}
            product = " x ".join(f"{name} {size}" for name, size in made_of.items() if size > 1)
            lower, upper = batch_size // parts * parts, (batch_size // parts + 1) * parts
            near = f"{lower} or {upper}" if lower else str(upper)
            raise PlanError("batch_size", batch_size, f"cannot be divided by {product}", f"use {near}")
        return batch_size // parts

    def uses_shared_memory(self, device_type: str) -> bool:
        """Whether ranks of one host may bypass torch.distributed: only if no back end is named."""
        return device_type == "cpu" and self.backend is None

    def num_micro_batches(self, degrees: ParallelDims) -> int:
        """Micro-batches in the pipeline at each micro-step; 1 without one."""
        if degrees.pipeline == 1:
            return 1
        return self.micro_batches or 2 * degrees.pipeline


def _count_copies(data: int, tensor: int, ranks_per_host: int | None) -> int:
    """One for each host among the data ranks of a stage. Raises PlanError when a copy would be in parts of hosts."""
    if ranks_per_host is None:
        return 1
    here, rest = divmod(ranks_per_host, tensor)  # data ranks of a host
    if rest or (data % here and here % data):
        problem = f"{data} data ranks of {tensor} each do not fill hosts of {ranks_per_host}"
        raise PlanError("parallel.replicate", "hosts", problem, "give the number of copies")
    return max(1, data // here)
