"""What IMPALA and PPO have in common: the model, its optimizer, their state, and the step on the gradients of a loss.

Legend: N steps, S segments laid end to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.models.recurrent_actor_critic import AnyActorCritic
from shoal.rl.algorithm_config import AlgorithmConfig, ImpalaConfig, PPOConfig
from shoal.rl.algorithms.algorithm import (
    Algorithm,
    NonFiniteLoss,
    build_model,
    find_device,
    restore_optimizer,
    set_learning_rate,
)
from shoal.rl.algorithms.normalization import Normalizer, TargetMoments
from shoal.rl.algorithms.segments import MOMENTS, compute_log_pi, compute_log_ratios, explain_variance, to_tensors
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner_group import LearnerGroup
from shoal.rl.spec import RLSpec
from shoal.wire import ExperienceSpec, Segment


class Losses(NamedTuple):
    """Scalars; `total` is minimised. Sums over the N steps divided by those of all learners: means, where it is one.

    rho_clip_fraction: of steps with an importance weight π / μ above its bound
    moments: [4], of the values' errors and targets, for `explain_variance`
    """

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    clip_fraction: Tensor
    rho_clip_fraction: Tensor
    kl: Tensor
    moments: Tensor


class ActorCriticAlgorithm(Algorithm):
    """A policy and its values, trained together by Adam."""

    adam_epsilon: ClassVar[float] = 1e-8
    _config: ImpalaConfig | PPOConfig
    _loss_config: ImpalaConfig | PPOConfig  # with the present weight of the entropy

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, folder: Path | None = None) -> None:
        assert isinstance(spec.algorithm, ImpalaConfig | PPOConfig)
        self._config = self._loss_config = spec.algorithm
        self.device, self.normalizer = find_device(spec), Normalizer(spec, experience)
        self.model: AnyActorCritic = build_model(spec, experience)
        self.model.to(self.device)
        self._parameters = list(self.model.parameters())
        self._targets, self._num_learnt = TargetMoments(), 0
        rate = self._config.learning_rate
        self._optimizer = torch.optim.Adam(self._parameters, lr=rate, eps=self.adam_epsilon, fused=True)

    def compute_gradients(self, losses: Losses, num_mine: int, num_steps: int, group: LearnerGroup) -> dict[str, float]:
        """Store the clipped gradients of a loss over `num_mine` steps in the model; returns a step's metrics.

        num_steps: of which the other learners of the group have the others
        """
        shown = self._add_shown_gradient()
        losses.total.backward()
        metrics = {
            "learner/loss": losses.total,
            "learner/policy_loss": losses.policy,
            "learner/value_loss": losses.value,
            "learner/entropy": losses.entropy,
            "learner/clip_fraction": losses.clip_fraction,
            "learner/rho_clip_fraction": losses.rho_clip_fraction,
            "learner/kl": losses.kl,
            **dict(zip(MOMENTS, losses.moments, strict=True)),
            "steps": losses.total.new_tensor(num_mine / num_steps),  # 0 in sum, if those who have them have died
        }
        sums = group.sum_gradients(self._parameters, metrics, num_mine, num_steps)
        grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
        error, squared_error, target, squared_target = (sums.pop(each) for each in MOMENTS)
        self._newest_targets = round(num_steps * sums.pop("steps")), target, squared_target
        explained = explain_variance(error, squared_error, target, squared_target)
        sums |= {"learner/explained_variance": explained, "learner/grad_norm": grad_norm.item()}
        return {**sums, **(shown or {})}

    def take_step(self, metrics: dict[str, float]) -> dict[str, float]:
        """Take the step of these gradients. Raises NonFiniteLoss, leaving the weights as they were."""
        num_steps, target, square = self._newest_targets
        if bad := find_non_finite({**metrics, "mean square of the value targets": square}):
            raise NonFiniteLoss(f"{', '.join(bad)} is not finite; lower algorithm.learning_rate or check the rewards")
        self._optimizer.step()
        self._targets.add(num_steps, target, square)
        self.model.set_value_unit(self._targets.deviation, self._targets.mean)
        return metrics

    @property
    def value_scale(self) -> float:
        """The unit in which values are learned: the deviation of their targets."""
        return self._targets.deviation

    def count_learnt(self, num_steps: int) -> None:
        """Count the environment steps of a batch of all learners: the entropy counts less and less."""
        share = 1 / (1 + self._num_learnt / self._config.entropy_half_steps)
        self._loss_config = self._config.model_copy(update={"entropy_cost": share * self._config.entropy_cost})
        self._num_learnt += num_steps

    def count_minibatches(self, num_steps: int) -> int:
        return max(1, round(num_steps / self._config.minibatch_steps))

    def count_epochs(self, num_steps: int) -> int:
        """As configured, but fewer for a batch that is smaller than a minibatch."""
        most = self._config.epochs
        return min(most, max(1, round(num_steps * most / self._config.minibatch_steps)))

    def draw_segments(self, batch: ExperienceBatch) -> Iterator[tuple[np.ndarray, int]]:
        """In each epoch, whole segments at random: yield which of this learner's are in a minibatch, bool [s], and the
        steps of all learners' segments in it."""
        segments, lengths = self.group.locate_segments(batch)
        total = int(lengths.sum())
        num_minibatches = min(len(lengths), self.count_minibatches(total))
        for _ in range(self.count_epochs(total)):
            for chosen in torch.randperm(len(lengths)).tensor_split(num_minibatches):
                yield np.isin(segments, chosen.numpy()), int(lengths[chosen.numpy()].sum())

    def take_demonstrations(self) -> bool:
        """Steps of cloning alone: a batch of experience has few, and comes from a policy that was shown nothing."""
        assert self.demonstrations is not None
        num_steps = self.demonstrations.take_cloning_steps()
        for _ in range(num_steps):
            if self._add_shown_gradient():
                nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
                self._optimizer.step()
        return num_steps > 0

    def _add_shown_gradient(self) -> Mapping[str, float] | None:
        """Replace the model's gradients by those of what was shown, if there is any; returns its metrics."""
        demonstrations = self.demonstrations
        shown = (
            None if demonstrations is None else demonstrations.compute_loss(self.compute_log_pi, self._differentiate)
        )
        if shown is None:
            self._optimizer.zero_grad()
        return shown

    def _differentiate(self, loss: Tensor) -> bool:
        """Replace the model's gradients by those of a loss; whether they are finite."""
        self._optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.get_total_norm([each.grad for each in self._parameters if each.grad is not None])
        return bool((loss + norm).isfinite())

    def compute_log_pi(self, segments: Sequence[Segment]) -> Tensor:
        """log π(a|x) of the steps [N] of segments, differentiable."""
        batch = self.normalizer.normalize(ExperienceBatch.from_segments(0, list(segments)))
        return compute_log_pi(self.model, to_tensors(batch, self.device))

    def compute_log_ratios(self, batch: ExperienceBatch) -> np.ndarray:
        return compute_log_ratios(self.model, to_tensors(batch, self.device))

    def configure(self, config: AlgorithmConfig) -> None:
        assert isinstance(config, type(self._config))
        self._config = self._loss_config = config
        set_learning_rate(self._optimizer, config.learning_rate)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "normalizer": self.normalizer.state_dict(),
            "targets": vars(self._targets),
            "num_learnt": self._num_learnt,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.normalizer.load_state_dict(state["normalizer"])
        vars(self._targets).update(state.get("targets", {"is_fixed": True}))
        self._num_learnt = state.get("num_learnt", 0)
        restore_optimizer(self._optimizer, state["optimizer"], self._config.learning_rate)


def find_non_finite(metrics: Mapping[str, float]) -> list[str]:
    """The names of the metrics that are NaN or infinite."""
    return [name for name, value in metrics.items() if not math.isfinite(value)]
