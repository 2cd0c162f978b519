"""What the Trainer asks of the other replicas of its model, whatever keeps them together.

Owns the interface, what an implementation is made of, the signals that it carries, and the first one, `AllReduce`.
Called by the Trainer alone. A replica is one rank, or the ranks that hold one copy of the model between them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shoal.errors import ConfigError
from shoal.parallel import World
from shoal.parallel.model import ParallelModel
from shoal.plugins.find import load_reference
from shoal.sync.config import SyncConfig

if TYPE_CHECKING:
    from shoal.channel.rpc import CurveKeys

INTERVAL_S = 0.5  # between two exchanges of signals
MAX_INTERVAL = 1_000  # steps


class RankSignals(NamedTuple):
    """What only one rank may have noticed: a stop request, a clock, a non-finite loss.

    One rank's observations; after an exchange, those of any rank, the mean of the clocks, and the sum of the losses.

    stop:          a stop was requested
    elapsed_s:     of this attempt of the run
    is_not_finite: a loss or gradient was not finite
    loss:          the sum over the steps since the last exchange, of `num_losses` of them, or of steps with this weight
    ends:          a callback wants the run to end
    named_losses:  the sums of further losses, in the order of their names, which all ranks have
    """

    stop: bool = False
    elapsed_s: float = 0.0
    is_not_finite: bool = False
    loss: float = 0.0
    num_losses: float = 0.0
    ends: bool = False
    named_losses: tuple[float, ...] = ()


class RankSync:
    """Exchanges signals after every `interval` steps, the same on all ranks; with one rank it only measures time.

    A few numbers in one collective. The interval follows from them, so that a step of a millisecond does not pay for an
    exchange. Called by `AllReduce`; decides nothing.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # A CPU back end of its own, so that an exchange never waits for the device.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._interval = 1
        self._steps = 0
        self._last_s = time.monotonic()

    def is_due(self) -> bool:
        """Call once after each step: whether to exchange signals now."""
        self._steps += 1
        return self._steps >= self._interval

    def exchange(self, mine: RankSignals) -> RankSignals:
        """Combine the signals of all ranks. Collective."""
        now, size = time.monotonic(), self._world.size
        step_s = (now - self._last_s) / max(self._steps, 1)
        loss = 0.0 if mine.is_not_finite else mine.loss
        values = torch.tensor(
            [
                mine.stop,
                mine.elapsed_s,
                mine.is_not_finite,
                loss,
                mine.num_losses,
                step_s,
                mine.ends,
                *mine.named_losses,
            ],
            dtype=torch.double,
        )
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        stop, elapsed_s, is_not_finite, loss, num_losses, step_s, ends, *named = values.tolist()
        wanted = int(INTERVAL_S * size / max(step_s, 1e-6))
        self._interval = min(MAX_INTERVAL, 2 * self._interval, max(1, wanted))
        self._steps, self._last_s = 0, now
        return RankSignals(stop > 0, elapsed_s / size, is_not_finite > 0, loss, num_losses, ends > 0, tuple(named))


@dataclass(frozen=True)
class StateAccess:
    """What a worker gives to one that joins, and how its present gradients count.

    get, load:   weights, buffers, optimiser and counters
    get_weights: (factor of this worker's gradients, their weight): a step divides the sum of all workers' gradients, by
                 their factors, by the sum of the weights
    """

    get: Callable[[], dict[str, Any]]
    load: Callable[[dict[str, Any]], None]
    get_weights: Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class Connection:
    """Of a worker in a run of replicas with the other processes of the run.

    index:      of the worker; 0 is the chief, which evaluates, saves and reports
    controller: its address; `servers`: theirs, "" for one that the controller will know
    timeout_s:  for which a call waits for its answer
    keys:       of the run, where its processes are on several hosts
    is_noticed: whether this worker is to leave, before its next step
    """

    index: int
    num_workers: int
    controller: str
    servers: list[str]
    timeout_s: float
    keys: CurveKeys | None = None
    is_noticed: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Replica:
    """What a worker's synchronizer is made of.

    connection: None where the ranks of `world` are all that there is
    """

    config: SyncConfig
    model: ParallelModel
    optimizer: Optimizer
    world: World
    state: StateAccess
    connection: Connection | None = None

    def require_connection(self) -> Connection:
        assert self.connection is not None, f"{self.config.kind} is for runs of replicas"
        return self.connection


class Traffic(msgspec.Struct):
    """What one worker has exchanged with the others. Bytes; `predicted` ones in a step: pushed, pulled."""

    num_steps: int
    pushed_bytes: int
    pulled_bytes: int
    predicted: tuple[float, float]


class Synchronizer(ABC):
    """One replica's view of all.

    is_chief: whether this replica evaluates, saves and reports. With `AllReduce` all do, since each has a part in it
    """

    is_chief: bool = True
    waited_s: float = 0.0  # for other replicas, beyond what the model's plan counts
    outer: Optimizer | None = None  # of others, over the same parameters: its momentum is saved, too

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

    def measure_traffic(self) -> Traffic | None:
        """Of this worker so far, for the run's record; None: it is not counted."""
        return None

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

    def __init__(self, replica: Replica) -> None:
        self.model, self.optimizer = replica.model, replica.optimizer
        self._rank_sync = RankSync(replica.world)
        self._steps = 0

    def begin(self, step: int) -> int:
        self._steps = step
        return step

    def before_step(self) -> None:
        """The optimiser has just put them there."""

    def apply_gradients(self) -> int:
        self.optimizer.step()
        self.model.on_optimizer_step()
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


def make_synchronizer(replica: Replica) -> Synchronizer:
    """The synchronizer that the replica's configuration names. Raises ConfigError."""
    synchronizer: object = find_synchronizer(replica.config)(replica)
    if not isinstance(synchronizer, Synchronizer):
        problem = f"{replica.config.synchronizer} makes a {type(synchronizer).__name__}"
        raise ConfigError("sync.kind", replica.config.kind, problem, "name a subclass of shoal.extend.Synchronizer")
    return synchronizer


def find_synchronizer(config: SyncConfig) -> Callable[[Replica], Synchronizer]:
    """What makes the synchronizer of a kind. Raises ConfigError when it cannot be imported."""
    try:
        factory: Callable[[Replica], Synchronizer] = load_reference(config.synchronizer)
    except ValueError as error:
        raise ConfigError("sync.kind", config.kind, str(error), "see `synchronizer` of its configuration") from error
    return factory
