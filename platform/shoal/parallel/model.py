"""What a Trainer sees of a model, however it is spread over processes: one interface, one implementation for each plan.

The rule that every implementation keeps: after `train_step` the gradients are those of the mean loss over the *global*
batch, as one process would have computed them on the whole of it. Called by the Trainer; knows no optimiser's schedule,
no file and no record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


class TaskProtocol(Protocol):
    """What a plan asks of a Task: how a batch enters the model, and what is made of what comes out."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """The positional arguments of the model."""
        ...

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Scalar: the mean over the samples of the batch."""
        ...

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """Scalars, each a mean over the samples of the batch."""
        ...

    def tensor_plan(self) -> dict[str, str] | None:
        """How layers are split between tensor ranks, by pattern of their names; None: found by their types."""
        ...

    def pipeline_cuts(self) -> list[str] | None:
        """The names of the modules with which stages after the first begin; None: found by measuring."""
        ...


def compute_loss_and_metrics(learnable: TaskProtocol, outputs: Any, batch: Any) -> dict[str, Tensor]:
    """The `loss`, and each metric: one of shape [1], say, as the scalar that it is."""
    metrics = {name: value.reshape(()) for name, value in learnable.metrics(outputs, batch).items()}
    return {"loss": learnable.loss(outputs, batch), **metrics}


class ParallelModel(ABC):
    """A model as this rank holds it.

    modules:        what lies on this rank: the model, its stage, or its several stages
    data_rank:      which share of each global batch this rank is fed, of `num_data_ranks`; ranks that split layers or
                    stages among themselves are fed the same share
    """

    modules: list[nn.Module]
    data_rank: int
    num_data_ranks: int

    @abstractmethod
    def train_step(self, batch: Any, step: int) -> Tensor:
        """Forward and backward over this rank's share of a global batch; gradients are cleared first.

        `step` seeds what is random within (dropout masks): the same step gives the same masks, whatever the plan.
        Returns the mean loss of the share, detached; on a rank that does not hold the last stage, a zero.
        Collective. Afterwards `.grad` of each parameter (of this rank's part of it) is the gradient of the mean loss
        over the global batch; None for a parameter that no rank used.
        """

    @abstractmethod
    def evaluate(self, batch: Any, num_samples: int) -> dict[str, Tensor]:
        """Sums over this rank's share: `loss` and each metric times `num_samples`; no gradients. Collective.

        A share may be smaller than others', and empty (`num_samples` 0: `batch` is then any batch, and counts nothing).
        """

    @abstractmethod
    def sum_over_data_ranks(self, values: Tensor) -> Tensor:
        """The element-wise sum of `values` over the data ranks, from the ranks that know them to all. Collective."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before. Collective."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, under the names that they have in the whole model; a tied one once."""

    @abstractmethod
    def model_state(self) -> dict[str, Any]:
        """Parameters and persistent buffers by their names in the whole model; DTensors where they are split."""

    @abstractmethod
    def load_model_state(self, state: dict[str, Any]) -> None:
        """Take what `model_state` gave (filled by a checkpoint)."""

    @abstractmethod
    def optimizer_state(self, optimizer: Optimizer, *, to_fill: bool = False) -> dict[str, Any]:
        """The optimiser's state by parameter name, ready for any other plan; what it has not yet, as it will be made.

        to_fill: what was made for this stays with the optimiser, for a checkpoint to be read into
        """

    @abstractmethod
    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take what `optimizer_state` gave (filled by a checkpoint)."""

    def loss_scale_state(self) -> dict[str, float]:
        """Where the scale of an fp16 loss has come to, the same on every rank; {} in another precision."""
        return {}

    def load_loss_scale_state(self, state: dict[str, float]) -> None:  # noqa: B027 - most precisions have nothing to do
        """Take what `loss_scale_state` gave, under whatever plan and precision."""

    @abstractmethod
    def full_weights(self) -> dict[str, Tensor]:
        """The whole model's state on the CPU, on rank 0; {} elsewhere. Collective."""

    def check_buffers(self) -> None:  # noqa: B027 - one process has nobody to differ from
        """Raises PlanError, on all data ranks or none, for a saved buffer that is not the same on them. Collective."""

    @property
    def communication_s(self) -> float:
        """Seconds that `train_step` has waited for other ranks so far; NaN where the plan cannot tell."""
        return float("nan")

    @property
    def shm_sent_bytes(self) -> float:
        """What this rank has sent by other ways than torch.distributed so far, counted as a ring would send it."""
        return 0.0

    @property
    def shared_memory(self) -> list[Tensor]:
        """What lies in memory that ranks of a host share to hand tensors to each other, and is no rank's own."""
        return []

    @property
    def busy_by_stage(self) -> dict[tuple[int, str], float]:
        """Seconds that each of this rank's pipeline stages, forward and backward, has computed so far; {} without."""
        return {}

    @property
    def scheduled_s(self) -> float:
        """Seconds that the schedules of the pipeline have taken so far; NaN without one."""
        return float("nan")

    def on_optimizer_step(self) -> None:  # noqa: B027 - most plans have nothing to do
        """Called after each step of the optimiser, for plans that hold copies of a parameter."""

    def close(self) -> None:  # noqa: B027 - most plans have nothing to do
        """Release what the plan holds beyond the modules. Idempotent."""
