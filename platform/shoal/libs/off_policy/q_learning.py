"""Algorithms with a replay, from which every step of the optimizer draws; and what DQN and R2D2 have in common.

External actors explore, as in Ape-X (Horgan et al., 1803.00933). Experience of any age is welcome: the losses need no
behaviour policy. Knows no clock, run or Ray.
"""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from shoal.extend.rl import (
    SINGLE,
    Algorithm,
    ExperienceBatch,
    Metrics,
    NonFiniteLoss,
    Normalizer,
    RLSpec,
    SampleShard,
    find_device,
    network_kwargs,
    restore_optimizer,
)
from shoal.libs.off_policy.configs import QLearningConfig, SACConfig
from shoal.libs.off_policy.q_network import QNetwork, RecurrentQNetwork
from shoal.libs.off_policy.replay import Replay
from shoal.libs.off_policy.sequence_replay import SequenceReplay
from shoal.wire import ExperienceSpec, Segment

_log = logging.getLogger(__name__)


class StepLoss(NamedTuple):
    """Of a share of a sample, with b items: `total`, a mean over its `num_steps` trained steps; the errors [b], for the
    priorities; and the mean value of each item [b], over steps and actions."""

    total: Tensor
    num_steps: int
    errors: Tensor
    values: Tensor


R = TypeVar("R", Replay, SequenceReplay)
SHOWN_SEGMENTS = 64  # that are inserted together


class ReplayAlgorithm(Algorithm, Generic[R]):
    """An algorithm whose replay stores each batch as it is. A learner that gets shares of samples has no replay.

    What others have shown is in a replay of its own, from which a share of each sample is drawn. Its rows are counted
    down from -1.
    """

    _replay: R
    _shown: R | None = None
    _generation = 0
    _is_offline = False  # samples are of what was shown alone

    @abstractmethod
    def make_replay(self, folder: Path | None) -> R:
        """An empty one, in memory or in a folder."""

    @abstractmethod
    def insert(self, batch: ExperienceBatch, replay: R) -> None:
        """Store a batch. Raises NonFiniteLoss, storing nothing, when `learn` would for its trial."""

    @abstractmethod
    def make_trial(self, batch: ExperienceBatch) -> SampleShard:
        """All items of a batch as a sample whose losses are sums: one of them may have a later sample to itself."""

    @abstractmethod
    def draw(self) -> tuple[np.ndarray, SampleShard]:
        """The numbers of drawn items, for the replay, and the sample of them."""

    @abstractmethod
    def learn(self, share: SampleShard, *, is_trial: bool = False) -> tuple[dict[str, float], np.ndarray]:
        """Take a step of the optimizer with the other learners of this sample; in a trial only compute its gradients,
        alone. Returns metrics, and the errors of the whole sample [num_items], NaN for unknown ones.

        Raises NonFiniteLoss, leaving the weights that it would move, when a loss or its gradient is not finite.
        """

    def is_usable(self, segment: ExperienceBatch) -> bool:
        return self._is_sound(self.make_trial(segment))

    def _is_sound(self, share: SampleShard) -> bool:
        try:
            self.learn(share, is_trial=True)
        except NonFiniteLoss:
            return False
        return True

    def clone_demonstrations(self) -> bool:
        assert self.demonstrations is not None
        if self._generation != self.demonstrations.generation:
            self._generation, segments = self.demonstrations.generation, list(self.demonstrations.get_segments())
            self._shown = self.make_replay(None)
            for begin in range(0, len(segments), SHOWN_SEGMENTS):
                self._insert_shown(segments[begin : begin + SHOWN_SEGMENTS], self._shown)
        has_shown = self._shown is not None and self._shown.num_drawable
        num_steps = self.demonstrations.take_offline_steps() if has_shown else 0
        self._is_offline = True
        for _ in range(num_steps):
            if self._shown is not None and self._shown.num_drawable:
                self.take_step()
        self._is_offline = False
        return num_steps > 0

    def _insert_shown(self, segments: list[Segment], replay: R) -> None:
        """Store them, without those whose own loss is not finite."""
        assert self.demonstrations is not None
        batch = ExperienceBatch.from_segments(0, segments)
        if not self.is_usable(batch):
            is_usable = np.array([self.is_usable(batch.select(one)) for one in np.eye(len(segments), dtype=bool)])
            self.demonstrations.leave_out([segments[index] for index in np.flatnonzero(~is_usable)])
            batch = batch.select(is_usable)
        if batch.num_steps:
            if self.normalizer.is_empty:
                self.normalizer.learn(batch, np.ones(len(batch.lengths), np.bool_))
            self.insert(batch, replay)

    def take_step(self) -> Metrics:
        """Draw a sample, and take a step of the optimizer on it. None is taken, and there are no metrics, when its loss
        is not finite: what was finite at its insertion no longer is, and leaves the replay."""
        rows, sample = self.draw()
        try:
            metrics, errors = self.learn(self.group.divide_sample(sample, self.serialize))
        except NonFiniteLoss:
            items = [
                sample.select(index, index + 1)._replace(first=0, num_items=1, num_steps=1)
                for index in range(len(rows))
            ]
            is_bad = np.array([not self._is_sound(each) for each in items])
            is_bad |= not is_bad.any()  # only together
            _log.warning("the loss of %d drawn items is not finite: they leave the replay", is_bad.sum())
            for replay, numbers, _ in self._group_by_replay(rows, is_bad):
                replay.remove(numbers)
            return {}
        for replay, numbers, is_own in self._group_by_replay(rows, ~np.isnan(errors)):
            replay.update_priorities(numbers, errors[is_own])
        return metrics

    def _group_by_replay(self, rows: np.ndarray, is_chosen: np.ndarray) -> Iterator[tuple[R, np.ndarray, np.ndarray]]:
        """Each replay with the numbers there of its chosen items, and which of the sample these are."""
        for replay, numbers in ((self._replay, rows), (self._shown, -1 - rows)):
            is_own = is_chosen & (numbers >= 0)
            if replay is not None and is_own.any():
                yield replay, numbers[is_own], is_own

    def draw_arrays(self, num_items: int, draw: Callable[[R, int], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Items of the replay by name, `rows` among them, and the share of those that were shown."""
        num_shown = num_items if self._is_offline else int(num_items * self.shown_share)
        if self._shown is None or not num_shown:
            return draw(self._replay, num_items)
        shown = draw(self._shown, num_shown)
        shown["rows"] = -1 - shown["rows"]
        if num_shown == num_items:
            return shown
        arrays = draw(self._replay, num_items - num_shown)
        return {name: np.concatenate([each, shown[name]]) for name, each in arrays.items()}

    @property
    def shown_share(self) -> float:
        """Of each sample, now."""
        has_shown = self._shown is not None and self._shown.num_drawable
        return self.demonstrations.share if has_shown and self.demonstrations else 0.0

    def describe_share(self) -> Metrics:
        """None in a run to which nothing was shown."""
        return {"learner/demonstration_share": self.shown_share} if self.shown_share else {}

    def prepare(self, batch: ExperienceBatch) -> ExperienceBatch:
        super().prepare(batch)
        return batch

    def learn_share(self, share: SampleShard) -> None:
        self.learn(share)


def require_finite(values: Sequence[float]) -> None:
    """Raises NonFiniteLoss."""
    if not np.isfinite(values).all():
        raise NonFiniteLoss(
            "the loss or its gradient is not finite; lower algorithm.learning_rate or check the rewards"
        )


def make_ring_options(
    config: QLearningConfig | SACConfig, folder: Path | None, priority_exponent: float
) -> tuple[int, float, np.random.Generator, Path | None]:
    """The size in bytes, exponent, random numbers (which follow from torch's seed) and folder of a replay."""
    random = np.random.default_rng(int(torch.randint(2**62, ())))
    ring_folder = folder / "replay" if folder is not None and config.replay_on_disk else None
    return int(config.replay_mb * 2**20), priority_exponent, random, ring_folder


class QLearning(ReplayAlgorithm[R]):
    """`samples_per_insert` drawn steps for every inserted one, in steps of Adam, with a target network and an
    exploration that travels with the weights."""

    network: ClassVar[type[QNetwork | RecurrentQNetwork]]
    model: QNetwork | RecurrentQNetwork
    _config: QLearningConfig

    def __init__(
        self, spec: RLSpec, experience: ExperienceSpec, folder: Path | None = None, has_replay: bool = True
    ) -> None:
        assert isinstance(spec.algorithm, QLearningConfig)
        self._config = config = spec.algorithm
        self.device, self.normalizer = find_device(spec), Normalizer(spec, experience)
        self.model = model = self.network(**network_kwargs(spec, experience)).to(self.device)
        self._experience, self._has_replay = experience, has_replay
        if has_replay:
            self._replay = self.make_replay(folder)
        self._target = copy.deepcopy(model).requires_grad_(False)
        self._parameters, self._target_parameters = flatten_parameters(model), flatten_parameters(self._target)
        self._optimizer = torch.optim.Adam([self._parameters], lr=config.learning_rate, fused=True)
        self._num_inserted = 0  # environment steps, over the run
        self._num_owed = 0.0  # drawn steps that inserted ones still allow
        self._num_updates = 0
        self._set_epsilon()

    @abstractmethod
    def count_draws(self) -> float:
        """The steps that one step of the optimizer draws."""

    @abstractmethod
    def compute_loss(self, share: SampleShard) -> StepLoss: ...

    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        self.insert(batch, self._replay)
        self._num_inserted += batch.num_steps
        self._set_epsilon()
        replay = self._replay
        if replay.num_steps < self._config.learning_starts and replay.num_drawable < replay.capacity // 2:
            return  # also where a restored replay is empty
        self._num_owed += self._config.samples_per_insert * batch.num_steps
        num_drawn = self.count_draws()
        while self._num_owed >= num_drawn and replay.num_drawable:
            self._num_owed -= num_drawn
            if not (metrics := self.take_step()):
                continue
            numbers = {"epsilon": self.model.epsilon.item(), "replay_steps": float(replay.num_steps)}
            yield {**metrics, **{f"learner/{name}": value for name, value in numbers.items()}, **self.describe_share()}

    def learn(self, share: SampleShard, *, is_trial: bool = False) -> tuple[dict[str, float], np.ndarray]:
        group = SINGLE if is_trial else self.group
        loss = self.compute_loss(share)
        total = loss.total * (loss.num_steps / share.num_steps)
        metrics = {
            "learner/loss": total,
            "learner/td_error": loss.errors.abs().sum() / share.num_items,
            "learner/q_value": loss.values.sum() / share.num_items,
            "squares": loss.errors.square().sum(),
        }
        gradient = self._parameters.grad
        assert gradient is not None
        gradient.zero_()
        total.backward()
        sums = group.sum_gradients([self._parameters], metrics, loss.num_steps, share.num_steps)
        sums["learner/grad_norm"] = clip_gradient(gradient, self._config.max_grad_norm)
        require_finite(list(sums.values()))
        del sums["squares"]  # finite beyond what the slope of Huber's loss bounds, too
        if not is_trial:
            self._take_optimizer_step()
        return sums, group.gather(loss.errors, share).cpu().numpy()

    def _take_optimizer_step(self) -> None:
        self._optimizer.step()
        self._num_updates += 1
        if self._num_updates % self._config.target_update_period == 0:
            self._target_parameters.data.copy_(self._parameters)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "normalizer": self.normalizer.state_dict(),
            "target": self._target.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "replay": self._replay.state_dict(),
            "num_inserted": self._num_inserted,
            "num_updates": self._num_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.normalizer.load_state_dict(state["normalizer"])
        self._target.load_state_dict(state["target"])
        restore_optimizer(self._optimizer, state["optimizer"], self._config.learning_rate)
        if self._has_replay:
            self._replay.load_state_dict(state["replay"])
        self._num_inserted, self._num_updates = state["num_inserted"], state["num_updates"]
        self._set_epsilon()

    def _set_epsilon(self) -> None:
        """Set ε: it falls from 1 to `epsilon`, linearly in the inserted steps."""
        progress = min(1.0, self._num_inserted / self._config.epsilon_steps)
        self.model.epsilon.fill_(1.0 + progress * (self._config.epsilon - 1.0))


def flatten_parameters(model: nn.Module) -> nn.Parameter:
    """Lay the parameters of `model` end to end, and their gradients too; those of the model become views of them: an
    optimizer's step is then a few operations, however many layers.

    Gradients add up in `.grad` of the result: set it to zero in place.
    """
    parameters = list(model.parameters())
    flat = nn.Parameter(torch.cat([each.detach().flatten() for each in parameters]))
    flat.grad = torch.zeros_like(flat)
    sizes = [each.numel() for each in parameters]
    for each, values, gradient in zip(parameters, flat.detach().split(sizes), flat.grad.split(sizes), strict=True):
        each.data, each.grad = values.view_as(each), gradient.view_as(each)
    return flat


def clip_gradient(gradient: Tensor, max_norm: float) -> float:
    """Scale `gradient` in place to a norm of at most `max_norm`; returns its norm before."""
    norm = float(gradient.norm())
    if norm > max_norm:
        gradient.mul_(max_norm / norm)
    return norm
