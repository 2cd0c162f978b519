"""How the replicas of a run stay one model: a field of the TrainSpec, beside the degrees of parallelism."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from shoal.config import Spec

SyncKind = Literal["all_reduce", "parameter_server", "local_sgd", "diloco"]


class SyncSpec(Spec):
    """`sync=all_reduce`, or `sync.kind=parameter_server sync.staleness=4`.

    kind:       all_reduce: every step waits for all ranks, and has the gradients of the global batch.
                parameter_server: servers hold weights and optimiser state; workers push gradients and pull weights.
                local_sgd: workers take `every` steps of their own, then their weights are averaged (1805.09767).
                diloco: the same, and the mean change of the weights is the gradient of an outer optimiser, SGD with
                Nesterov momentum (2311.08105)
    servers:    among which weights and optimiser state are divided, by bytes
    staleness:  how many steps a worker may be ahead of the slowest: 0 waits for all in each step (BSP: the updates of
                synchronous training), s is SSP (1302.0079), None never waits
    rate:       `constant`; or `per_staleness`: the learning rate of an update divided by max(1, τ) (1511.05950)
    compensation: λ of DC-ASGD (1609.08326): g + λ g ⊙ g ⊙ (w_now - w_pulled); 0: none
    backups:    with staleness 0, workers whose gradients a step does not wait for (1604.00981)
    every:      local_sgd and diloco: steps of a worker between two exchanges
    outer_learning_rate, outer_momentum: of diloco
    """

    kind: SyncKind = "all_reduce"
    servers: int = Field(default=1, ge=1)
    staleness: int | None = Field(default=0, ge=0)
    rate: Literal["constant", "per_staleness"] = "constant"
    compensation: float = Field(default=0.0, ge=0)
    backups: int = Field(default=0, ge=0)
    every: int = Field(default=50, ge=1)
    outer_learning_rate: float = Field(default=0.7, gt=0)
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _parse_kind(cls, value: object) -> object:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.backups and self.staleness != 0:
            raise ValueError("backups: only with staleness=0, where a step waits for workers")
        if self.kind != "parameter_server" and (self.rate != "constant" or self.compensation):
            raise ValueError(f"rate and compensation: only with parameter_server, not with {self.kind}")
        return self

    @property
    def has_local_steps(self) -> bool:
        """Whether workers take steps of an optimiser of their own."""
        return self.kind in ("local_sgd", "diloco")
