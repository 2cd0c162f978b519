"""What DQN and R2D2 have in common: each batch goes into a prioritised replay, from which every step of the optimizer
draws; a target network; and an exploration that travels with the weights.

External actors explore, as in Ape-X (Horgan et al., 1803.00933). Experience of any age is welcome: the losses need no
behaviour policy. Knows no clock, device, run or Ray.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.errors import RunError
from shoal.libs.off_policy.dqn.config import DQNConfig
from shoal.libs.off_policy.flat_parameters import clip_gradient, flatten_parameters
from shoal.libs.off_policy.q_network import QNetwork, RecurrentQNetwork
from shoal.libs.off_policy.r2d2.config import R2D2Config
from shoal.libs.off_policy.replay.replay import Replay
from shoal.libs.off_policy.replay.sequence_replay import SequenceReplay
from shoal.rl.algorithms.algorithm import Algorithm, Metrics, restore_optimizer
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner_group import SampleShare


class StepLoss(NamedTuple):
    """Of a share of a sample, with b items: `total`, a mean over its `num_steps` trained steps; the errors [b], for the
    priorities; and the mean value of each item [b], over steps and actions."""

    total: Tensor
    num_steps: int
    errors: Tensor
    values: Tensor


class QLearning(Algorithm):
    """`samples_per_insert` drawn steps for every inserted one, in steps of Adam.

    replay: None in a learner that gets its shares of what another one draws
    """

    model: QNetwork | RecurrentQNetwork
    _replay: Replay | SequenceReplay

    def __init__(
        self,
        config: DQNConfig | R2D2Config,
        model: QNetwork | RecurrentQNetwork,
        replay: Replay | SequenceReplay | None,
    ) -> None:
        self._settings, self.model = config, model
        self._has_replay = replay is not None
        if replay is not None:
            self._replay = replay
        self._target = copy.deepcopy(model).requires_grad_(False)
        self._parameters, self._target_parameters = flatten_parameters(model), flatten_parameters(self._target)
        self._optimizer = torch.optim.Adam([self._parameters], lr=config.learning_rate, fused=True)
        self._num_inserted = 0  # environment steps, over the run
        self._num_owed = 0.0  # drawn steps that inserted ones still allow
        self._num_updates = 0
        self._set_epsilon()

    @abstractmethod
    def _insert(self, batch: ExperienceBatch) -> None:
        """Store a batch. Raises NonFiniteLoss, storing nothing, when an error of its steps is not finite."""

    @abstractmethod
    def _count_draws(self) -> float:
        """The steps that one step of the optimizer draws."""

    @abstractmethod
    def _draw(self) -> tuple[np.ndarray, SampleShare]:
        """The numbers of drawn items, for the replay, and the whole sample of them."""

    @abstractmethod
    def _compute_loss(self, share: SampleShare) -> StepLoss: ...

    def learn_share(self, share: SampleShare) -> None:
        self._learn(share)

    def _step(self) -> Metrics:
        """One step of the optimizer. Raises RunError, leaving the weights, when their loss is not finite any more."""
        rows, sample = self._draw()
        metrics, errors = self._learn(self.group.divide_sample(sample, self.serialize))
        is_known = ~np.isnan(errors)  # not of a learner that has died
        self._replay.update_priorities(rows[is_known], errors[is_known])
        numbers = {"epsilon": self.model.epsilon.item(), "replay_steps": float(self._replay.num_steps)}
        return {**metrics, **{f"learner/{name}": value for name, value in numbers.items()}}

    def _learn(self, share: SampleShare) -> tuple[dict[str, float], np.ndarray]:
        """The step; returns metrics and errors of the whole sample [num_items]."""
        loss = self._compute_loss(share)
        total = loss.total * (loss.num_steps / share.num_steps)
        metrics = {
            "learner/loss": total,
            "learner/td_error": loss.errors.abs().sum() / share.num_items,
            "learner/q_value": loss.values.sum() / share.num_items,
        }
        found = self._minimize(total, metrics, loss.num_steps, share.num_steps)
        return found, self.group.gather(loss.errors, share).cpu().numpy()

    def prepare(self, batch: ExperienceBatch) -> ExperienceBatch:
        super().prepare(batch)
        return batch  # the replay stores it as it is

    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        self._insert(batch)
        self._num_inserted += batch.num_steps
        self._set_epsilon()
        if not self._has_enough():  # the restored replay may be empty
            return
        self._num_owed += self._settings.samples_per_insert * batch.num_steps
        num_drawn = self._count_draws()
        while self._num_owed >= num_drawn:
            self._num_owed -= num_drawn
            yield self._step()

    def _has_enough(self) -> bool:
        replay = self._replay
        return replay.num_steps >= self._settings.learning_starts or replay.num_drawable >= replay.capacity // 2

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
        self.normalizer.load_state_dict(state.get("normalizer", {}))
        self._target.load_state_dict(state["target"])
        restore_optimizer(self._optimizer, state["optimizer"], self._settings.learning_rate)
        if self._has_replay:
            self._replay.load_state_dict(state["replay"])
        self._num_inserted, self._num_updates = state["num_inserted"], state["num_updates"]
        self._set_epsilon()

    def _minimize(self, loss: Tensor, metrics: Mapping[str, Tensor], num_mine: int, num_steps: int) -> dict[str, float]:
        """Take a step with the other learners; returns metrics of all. Raises RunError."""
        gradient = self._parameters.grad
        assert gradient is not None
        gradient.zero_()
        loss.backward()
        found = self.group.sum_gradients([self._parameters], metrics, num_mine, num_steps)
        grad_norm = clip_gradient(gradient, self._settings.max_grad_norm)
        if not np.isfinite(grad_norm):
            raise RunError("the loss of replayed experience is not finite: lower algorithm.learning_rate")
        self._optimizer.step()
        self._num_updates += 1
        if self._num_updates % self._settings.target_update_period == 0:
            self._target_parameters.data.copy_(self._parameters)
        return {**found, "learner/grad_norm": grad_norm}

    def _set_epsilon(self) -> None:
        """From 1 to `epsilon`, linearly in the inserted steps."""
        progress = min(1.0, self._num_inserted / self._settings.epsilon_steps)
        self.model.epsilon.fill_(1.0 + progress * (self._settings.epsilon - 1.0))


def make_random() -> np.random.Generator:
    """The replay's random numbers, which follow from torch's seed."""
    return np.random.default_rng(int(torch.randint(2**62, ())))


def find_folder(config: DQNConfig | R2D2Config, folder: Path | None) -> Path | None:
    """Where the replay's files are, if it is on disk."""
    return folder / "replay" if folder is not None and config.replay_on_disk else None
