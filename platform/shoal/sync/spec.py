"""How the replicas of a run stay one model: a field of the TrainSpec, beside the degrees of parallelism."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from shoal.config import Spec

SyncKind = Literal["all_reduce", "parameter_server"]


class SyncSpec(Spec):
    """`sync=all_reduce`, or `sync.kind=parameter_server sync.staleness=4`.

    kind:       all_reduce: every step waits for all ranks, and has the gradients of the global batch.
                parameter_server: servers hold weights and optimiser state; workers push gradients and pull weights
    servers:    among which weights and optimiser state are divided, by bytes
    staleness:  how many steps a worker may be ahead of the slowest: 0 waits for all in each step (BSP: the updates of
                synchronous training), s is SSP (1302.0079), None never waits
    rate:       `constant`; or `per_staleness`: the learning rate of an update divided by max(1, τ) (1511.05950)
    compensation: λ of DC-ASGD (1609.08326): g + λ g ⊙ g ⊙ (w_now - w_pulled); 0: none
    backups:    with staleness 0, workers whose gradients a step does not wait for (1604.00981)
    """

    kind: SyncKind = "all_reduce"
    servers: int = Field(default=1, ge=1)
    staleness: int | None = Field(default=0, ge=0)
    rate: Literal["constant", "per_staleness"] = "constant"
    compensation: float = Field(default=0.0, ge=0)
    backups: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _parse_kind(cls, value: object) -> object:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.backups and self.staleness != 0:
            raise ValueError("backups: only with staleness=0, where a step waits for workers")
        return self
