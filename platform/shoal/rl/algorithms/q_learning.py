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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import RunError
from shoal.models.q_network import QNetwork, RecurrentQNetwork
from shoal.rl.algorithms.algorithm import Algorithm, Metrics, restore_optimizer
from shoal.rl.algorithms.dqn.config import DQNConfig
from shoal.rl.algorithms.flat_parameters import clip_gradient, flatten_parameters
from shoal.rl.algorithms.r2d2.config import R2D2Config
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.replay.replay import Replay
from shoal.rl.replay.sequence_replay import SequenceReplay


class QLearning(Algorithm):
    """`samples_per_insert` drawn steps for every inserted one, in steps of Adam."""

    model: QNetwork | RecurrentQNetwork

    def __init__(
        self,
        config: DQNConfig | R2D2Config,
        model: QNetwork | RecurrentQNetwork,
        replay: Replay | SequenceReplay,
    ) -> None:
        self._settings, self.model, self._replay = config, model, replay
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
    def _step(self) -> Metrics:
        """One step of the optimizer. Raises RunError, leaving the weights, when their loss is not finite any more."""

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
            "target": self._target.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "replay": self._replay.state_dict(),
            "num_inserted": self._num_inserted,
            "num_updates": self._num_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._target.load_state_dict(state["target"])
        restore_optimizer(self._optimizer, state["optimizer"], self._settings.learning_rate)
        self._replay.load_state_dict(state["replay"])
        self._num_inserted, self._num_updates = state["num_inserted"], state["num_updates"]
        self._set_epsilon()

    def _minimize(self, loss: Tensor) -> float:
        """Take a step; returns the norm of the gradient. Raises RunError."""
        gradient = self._parameters.grad
        assert gradient is not None
        gradient.zero_()
        loss.backward()
        grad_norm = clip_gradient(gradient, self._settings.max_grad_norm)
        if not np.isfinite(grad_norm):
            raise RunError("the loss of replayed experience is not finite: lower algorithm.learning_rate")
        self._optimizer.step()
        self._num_updates += 1
        if self._num_updates % self._settings.target_update_period == 0:
            self._target_parameters.data.copy_(self._parameters)
        return grad_norm

    def _describe_step(self, loss: Tensor, errors: np.ndarray, q: Tensor, grad_norm: float) -> Metrics:
        return {
            "learner/loss": loss.item(),
            "learner/td_error": float(np.abs(errors).mean()),
            "learner/q_value": q.mean().item(),
            "learner/grad_norm": grad_norm,
            "learner/epsilon": self.model.epsilon.item(),
            "learner/replay_steps": float(self._replay.num_steps),
        }

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
