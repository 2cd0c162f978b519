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
    transport:  of weights and gradients: `shared_memory`, `frames` in messages, or `auto`: frames where a worker cannot
                open the memory of a server, which is on another host
    durable:    no update is lost: a server writes each gradient to the disk before the worker goes on
    compression: of what a worker pushes: `fp16`, or `top_k`, the fraction of the elements with the largest magnitude;
                what is not sent is added to the next gradient (1809.07599)
    top_k:      that fraction
    accumulate: micro-batches between a pull and a push; the gradient is their mean
    balance:    with staleness 0 and `accumulate`: a worker's number of micro-batches follows its measured speed
    hogwild:    with all_reduce and one worker: lanes that train its weights at once, without locks (1106.5730)
    hogwild_mode: threads or processes; `auto` tries both for a second each and goes on with the faster
    every:      local_sgd and diloco: steps of a worker between two exchanges
    outer_learning_rate, outer_momentum: of diloco
    quorum:     local_sgd and diloco: workers, or below 1 the fraction of those that take part, that must have pushed
                before a merge; None: all (2604.21428)
    grace_s:    how long a merge waits for the others after that
    fragments:  parts of the model that are exchanged one after the other within `every` steps (2501.18512)
    delay:      steps of a worker between a push and the use of what was merged
    blend:      with a delay, the share of a worker's own weights in the fragment that it goes on with (2501.18512)
    """

    kind: SyncKind = "all_reduce"
    servers: int = Field(default=1, ge=1)
    staleness: int | None = Field(default=0, ge=0)
    rate: Literal["constant", "per_staleness"] = "constant"
    compensation: float = Field(default=0.0, ge=0)
    backups: int = Field(default=0, ge=0)
    transport: Literal["auto", "shared_memory", "frames"] = "auto"
    durable: bool = False
    compression: Literal["none", "fp16", "top_k"] = "none"
    top_k: float = Field(default=0.01, gt=0, le=1)
    accumulate: int = Field(default=1, ge=1)
    balance: bool = False
    hogwild: int = Field(default=1, ge=1)
    hogwild_mode: Literal["auto", "threads", "processes"] = "auto"
    every: int = Field(default=50, ge=1)
    outer_learning_rate: float = Field(default=0.7, gt=0)
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    quorum: int | float | None = Field(default=None, gt=0)
    grace_s: float = Field(default=1.0, ge=0)
    fragments: int = Field(default=1, ge=1)
    delay: int = Field(default=0, ge=0)
    blend: float = Field(default=0.5, ge=0, le=1)

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
        if self.durable and self.compensation:
            raise ValueError("durable does not go with compensation: the weights that a worker pulled are not logged")
        if self.kind != "parameter_server" and (self.accumulate > 1 or self.balance):
            raise ValueError(f"accumulate and balance: only with parameter_server, not with {self.kind}")
        if self.balance and (self.staleness != 0 or self.backups or self.accumulate < 2):
            raise ValueError(
                "balance: it divides the micro-batches of a step: use staleness=0, no backups, accumulate > 1"
            )
        if self.hogwild > 1 and self.kind != "all_reduce":
            raise ValueError(
                f"hogwild: lanes share the weights of a process, which {self.kind} replaces by the servers'"
            )
        if self.kind == "all_reduce" and (self.durable or self.compression != "none" or self.transport != "auto"):
            raise ValueError("durable, compression and transport: all_reduce has no servers; choose another sync.kind")
        self._require_local_steps()
        return self

    def _require_local_steps(self) -> None:
        """Quorum, fragments and delay are of local steps."""
        if not self.has_local_steps:
            if self.quorum is not None or self.fragments > 1 or self.delay:
                raise ValueError(f"quorum, fragments and delay: only with local_sgd and diloco, not with {self.kind}")
            return
        if self.quorum is not None and self.staleness != 0:
            raise ValueError("quorum: only with staleness=0, where workers wait for a merge")
        if self.backups:
            raise ValueError(f"backups: with {self.kind} use quorum, which loses nothing of the late workers")
        if isinstance(self.quorum, float) and self.quorum >= 1:
            raise ValueError(f"quorum={self.quorum}: a number of workers, or a fraction below 1")
        if self.fragments > self.every:
            raise ValueError(f"fragments={self.fragments}: at most every={self.every}, a step for each")
        if self.delay >= self.every // self.fragments:
            limit = self.every // self.fragments
            raise ValueError(f"delay={self.delay}: less than the {limit} steps between two exchanges")

    def predict_bytes(self, num_elements: int) -> tuple[float, float]:
        """Bytes that a worker pushes in a step, and pulls, on the average, for so many float32 parameters."""
        pulled = 4 * num_elements / (self.every if self.has_local_steps else self.accumulate)
        shares = {"none": 1.0, "fp16": 0.5, "top_k": 2 * self.top_k}  # top_k: an index for each element
        return shares[self.compression] * pulled, pulled

    @property
    def has_local_steps(self) -> bool:
        """Whether workers take steps of an optimiser of their own."""
        return self.kind in ("local_sgd", "diloco")
