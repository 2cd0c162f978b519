"""The kinds of asynchronous and elastic training: their fields. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from shoal.extend.sync import SyncConfig
from shoal.extend.train import list_parameters

if TYPE_CHECKING:
    from torch.optim import Optimizer


class ServersConfig(SyncConfig):
    """What all of them have.

    servers:     among which weights and optimiser state are divided, by bytes
    staleness:   how many steps a worker may be ahead of the slowest: 0 waits for all in each step (BSP: the updates of
                 synchronous training), s is SSP (1302.0079), None never waits
    transport:   of weights and gradients: `shared_memory`, `frames` in messages, or `auto`: frames where a worker
                 cannot open the memory of a server, which is on another host
    compression: of what a worker pushes: `fp16`, or `top_k`, the fraction of the elements with the largest magnitude;
                 what is not sent is added to the next gradient (1809.07599)
    top_k:       that fraction
    """

    servers: int = Field(default=1, ge=1)
    staleness: int | None = Field(default=0, ge=0)
    transport: Literal["auto", "shared_memory", "frames"] = "auto"
    compression: Literal["none", "fp16", "top_k"] = "none"
    top_k: float = Field(default=0.01, gt=0, le=1)

    controller = "shoal.libs.asynchronous.parameter_server.controller:make_server_controller"

    probe = "shoal.libs.asynchronous.costs:ServerProbe"

    @property
    def num_servers(self) -> int:
        return self.servers

    @property
    def waits_for_all(self) -> bool:
        return self.staleness == 0

    @property
    def shares_memory(self) -> bool:
        return self.transport == "shared_memory"

    @property
    def num_backups(self) -> int:
        """With staleness 0: workers whose gradients a step does not wait for."""
        return 0

    @property
    def is_balanced(self) -> bool:
        """Whether a worker's number of micro-batches follows its measured speed."""
        return False

    @property
    def delay_compensation(self) -> float:
        """λ of DC-ASGD; 0: none."""
        return 0.0

    @property
    def steps_between_pulls(self) -> int:
        """Steps, or micro-batches, of a worker between two exchanges of the full model."""
        return self.micro_batches

    def scale_rate(self, staleness: int) -> float:
        """By what the learning rate of an update of this staleness is multiplied."""
        return 1.0

    def make_server_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The servers' optimiser, over the parameters of the Task's in their order."""
        return optimizer

    def check_model(self, optimizer: Optimizer) -> None:
        """Raises ConfigError where servers cannot divide the model and its optimiser."""
        from shoal.libs.asynchronous.parameter_server.partition import plan_partition

        plan_partition(self.make_server_optimizer(optimizer), self.servers)

    def predict_bytes(self, num_elements: int) -> tuple[float, float]:
        """Bytes that a worker pushes in a step, and pulls, on the average, for so many float32 parameters."""
        pulled = 4 * num_elements / self.steps_between_pulls
        shares = {"none": 1.0, "fp16": 0.5, "top_k": 2 * self.top_k}  # top_k: an index for each element
        return shares[self.compression] * pulled, pulled


class ParameterServerConfig(ServersConfig):
    """Workers push gradients and pull weights.

    rate:         `constant`; or `per_staleness`: the learning rate of an update divided by max(1, τ) (1511.05950)
    compensation: λ of DC-ASGD (1609.08326): g + λ g ⊙ g ⊙ (w_now - w_pulled); 0: none
    backups:      with staleness 0, workers whose gradients a step does not wait for (1604.00981)
    accumulate:   micro-batches between a pull and a push; the gradient is their mean
    balance:      with staleness 0 and `accumulate`: a worker's number of micro-batches follows its measured speed
    """

    kind: Literal["parameter_server"] = "parameter_server"
    rate: Literal["constant", "per_staleness"] = "constant"
    compensation: float = Field(default=0.0, ge=0)
    backups: int = Field(default=0, ge=0)
    accumulate: int = Field(default=1, ge=1)
    balance: bool = False

    synchronizer = "shoal.libs.asynchronous.parameter_server.worker:make_server_sync"
    one_optimizer = (
        "servers apply the gradients of one",
        "use all_reduce, local_sgd or diloco",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.backups and self.staleness != 0:
            raise ValueError("backups: only with staleness=0, where a step waits for workers")
        if self.balance and (self.staleness != 0 or self.backups or self.accumulate < 2):
            raise ValueError(
                "balance: it divides the micro-batches of a step: use staleness=0, no backups, accumulate > 1"
            )
        return self

    @property
    def micro_batches(self) -> int:
        return self.accumulate

    @property
    def num_backups(self) -> int:
        return self.backups

    @property
    def is_balanced(self) -> bool:
        return self.balance

    @property
    def delay_compensation(self) -> float:
        return self.compensation

    def scale_rate(self, staleness: int) -> float:
        return 1 / max(1, staleness) if self.rate == "per_staleness" else 1.0


class LocalStepsConfig(ServersConfig):
    """Workers take `every` steps of their own; the servers' optimiser takes a step with the mean of their changes.

    every:     steps of a worker between two exchanges
    quorum:    workers, or below 1 the fraction of those that take part, that must have pushed before a merge; None: all
               (2604.21428)
    grace_s:   how long a merge waits for the others after that
    fragments: parts of the model that are exchanged one after the other within `every` steps (2501.18512)
    delay:     steps of a worker between a push and the use of what was merged
    blend:     with a delay, the share of a worker's own weights in the fragment that it goes on with (2501.18512)
    """

    every: int = Field(default=50, ge=1)
    quorum: int | float | None = Field(default=None, gt=0)
    grace_s: float = Field(default=1.0, ge=0)
    fragments: int = Field(default=1, ge=1)
    delay: int = Field(default=0, ge=0)
    blend: float = Field(default=0.5, ge=0, le=1)

    synchronizer = "shoal.libs.asynchronous.parameter_server.local_steps:make_local_steps_sync"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.quorum is not None and self.staleness != 0:
            raise ValueError("quorum: only with staleness=0, where workers wait for a merge")
        if isinstance(self.quorum, float) and self.quorum >= 1:
            raise ValueError(f"quorum={self.quorum}: a number of workers, or a fraction below 1")
        if self.fragments > self.every:
            raise ValueError(f"fragments={self.fragments}: at most every={self.every}, a step for each")
        if self.delay >= (limit := self.every // self.fragments):
            raise ValueError(f"delay={self.delay}: less than the {limit} steps between two exchanges")
        return self

    @property
    def local_steps(self) -> int:
        return self.every

    @property
    def steps_between_pulls(self) -> int:
        return self.every

    @property
    def outer_settings(self) -> tuple[float, float]:
        """Learning rate and momentum of the servers' optimiser, SGD: with 1 and 0 it averages the weights."""
        return 1.0, 0.0

    def make_server_optimizer(self, optimizer: Optimizer) -> Optimizer:
        from torch.optim import SGD

        parameters = list_parameters(optimizer)
        rate, momentum = self.outer_settings
        return SGD(parameters, lr=rate, momentum=momentum, nesterov=momentum > 0)

    def check_model(self, optimizer: Optimizer) -> None:
        from shoal.libs.asynchronous.parameter_server.partition import divide_fragments

        divide_fragments([each.numel() for each in list_parameters(optimizer)], self.fragments)
        super().check_model(optimizer)


class LocalSGDConfig(LocalStepsConfig):
    """The weights of all workers are averaged (1805.09767)."""

    kind: Literal["local_sgd"] = "local_sgd"


class DiLoCoConfig(LocalStepsConfig):
    """The mean change of the weights is the gradient of SGD with Nesterov momentum (2311.08105).

    outer_learning_rate, outer_momentum: of that SGD
    """

    kind: Literal["diloco"] = "diloco"
    outer_learning_rate: float = Field(default=0.7, gt=0)
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)

    @property
    def outer_settings(self) -> tuple[float, float]:
        return self.outer_learning_rate, self.outer_momentum


class ElasticConfig(SyncConfig):
    """`all_reduce` with `workers=[min_workers,workers]`: a step has the gradients of all that take part, which may
    change."""

    kind: Literal["elastic"] = "elastic"
    workers: int
    min_workers: int

    synchronizer = "shoal.libs.asynchronous.elastic_worker:make_elastic_sync"
    controller = "shoal.libs.asynchronous.elastic_controller:make_elastic_controller"
    has_every_step = True
    chief_may_leave = True
    one_optimizer = ("workers that join share the gradients of one", "use workers=N")

    @property
    def chosen_by(self) -> tuple[str, object]:
        return "workers", f"[{self.min_workers},{self.workers}]"


class HogwildConfig(SyncConfig):
    """`all_reduce` with `sync.hogwild` > 1: lanes of one process."""

    kind: Literal["hogwild"] = "hogwild"
    lanes: int

    synchronizer = "shoal.libs.asynchronous.hogwild:HogwildSync"
    has_replicas = False
    admits_cuda = False
    one_optimizer = ("a lane has one", "leave it out")

    @property
    def chosen_by(self) -> tuple[str, object]:
        return "sync.hogwild", self.lanes

    @property
    def num_lanes(self) -> int:
        return self.lanes

    def check_run(self, workers: int, batch_size: int) -> None:
        if workers > 1 or batch_size % self.lanes:
            raise ValueError(f"sync.hogwild={self.lanes}: give workers=1, and a batch_size that it divides")
