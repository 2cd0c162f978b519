"""What the Trainer asks of the other replicas of its model, whatever keeps them together.

Owns the interface and its first implementation, `AllReduce`. Called by the Trainer alone. A replica is one rank, or the
ranks that hold one copy of the model between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch.optim import Optimizer

from shoal.parallel import World
from shoal.parallel.model import ParallelModel
from shoal.sync.rank_signals import RankSignals, RankSync


class Synchronizer(ABC):
    """One replica's view of all.

    is_chief: whether this replica evaluates, saves and reports. With `AllReduce` all do, since each has a part in it
    """

    is_chief: bool = True
    waited_s: float = 0.0  # for other replicas, beyond what the model's plan counts

    @abstractmethod
    def begin(self, step: int) -> int:
        """Called before the first step, with the state after `step` steps restored on the chief.

        Returns the number of finished steps of the run, of which the model now has the weights.
        """

    @abstractmethod
    def before_step(self) -> None:
        """Put the weights into the model with which the next gradients are computed."""

    def before_evaluation(self) -> None:
        """Put the weights into the model that are evaluated. The next `before_step` puts back what it needs."""
        self.before_step()

    def combine_gradients(self) -> None:  # noqa: B027 - most have the gradients of the step already, or hand them over
        """Put the gradients of the step into `.grad`, before they are clipped and applied."""

    @abstractmethod
    def apply_gradients(self) -> int:
        """Hand over the gradients (`.grad`), here or elsewhere. Returns the number of finished steps of the run."""

    @abstractmethod
    def is_exchange_due(self) -> bool:
        """Called once after each step: whether to exchange signals now."""

    @abstractmethod
    def exchange(self, mine: RankSignals) -> RankSignals:
        """The signals of all replicas, combined."""

    @abstractmethod
    def collect_state(self) -> None:
        """On the chief, before a save: put the weights and the optimiser's state of one moment into both."""

    @abstractmethod
    def end(self) -> None:
        """This replica takes no further step; if it is the chief, none does."""

    @abstractmethod
    def close(self) -> None:
        """Release what this holds. Idempotent."""


class AllReduce(Synchronizer):
    """Synchronous training: every rank takes part in every step, evaluation and save.

    The gradients that a `ParallelModel` computes are those of the mean loss over the global batch, by its plan, and
    every rank takes the same step with its part of the optimiser.
    """

    def __init__(self, model: ParallelModel, optimizer: Optimizer, world: World) -> None:
        self._model, self._optimizer = model, optimizer
        self._rank_sync = RankSync(world)
        self._steps = 0

    def begin(self, step: int) -> int:
        self._steps = step
        return step

    def before_step(self) -> None:
        """The optimiser has just put them there."""

    def apply_gradients(self) -> int:
        self._optimizer.step()
        self._model.on_optimizer_step()
        self._steps += 1
        return self._steps

    def is_exchange_due(self) -> bool:
        return self._rank_sync.is_due()

    def exchange(self, mine: RankSignals) -> RankSignals:
        return self._rank_sync.exchange(mine)

    def collect_state(self) -> None:
        """Every rank has its part."""

    def end(self) -> None:
        """All end at the same step."""

    def close(self) -> None:
        """Nothing of its own."""
