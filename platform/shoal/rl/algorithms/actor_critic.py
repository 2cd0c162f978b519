"""What IMPALA and PPO have in common: targets of a batch, loss of a minibatch, the model, its optimizer, their state.

Both learn from each batch several times, within a trust region around the policies that have acted, which may be of
older weights. They differ in how they estimate advantages (`trace`) and in what the policy maximises (`gain`). Knows no
clock, run or Ray. Legend: N steps, S segments laid end to end; T steps of the longest of B segments; `mask` is 1 on
real steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.models.action_distribution import Categorical, MultiCategorical, SquashedGaussian, mask_logits
from shoal.models.actor_critic import AnyActorCritic
from shoal.rl.algorithm_config import AlgorithmConfig, ImpalaConfig, PPOConfig
from shoal.rl.algorithms.algorithm import (
    Algorithm,
    Metrics,
    NonFiniteLoss,
    build_model,
    find_device,
    restore_optimizer,
    set_learning_rate,
)
from shoal.rl.algorithms.normalization import Normalizer, TargetMoments
from shoal.rl.algorithms.segments import (
    MOMENTS,
    SegmentBatch,
    compute_log_pi,
    compute_log_ratios,
    compute_moments,
    evaluate_rows,
    explain_variance,
    get_discounts,
    make_grid,
    to_tensors,
)
from shoal.rl.algorithms.vtrace import VTrace
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner_group import SINGLE, LearnerGroup, standardize
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


class StepTargets(NamedTuple):
    """Of each step: log μ(a|x) of the policy μ that has acted; by the weights before the batch, advantages and value
    targets; all [N]."""

    log_probabilities: Tensor
    advantages: Tensor
    values: Tensor

    def select(self, chosen: Tensor) -> StepTargets:
        """Select those of some steps."""
        return StepTargets(*(each[chosen] for each in self))


@torch.no_grad()
def estimate_targets(
    outputs: Tensor,  # of the distribution, [N+S, ...], as `values` [N+S] for every observation
    values: Tensor,
    batch: SegmentBatch,
    config: Any,
    distribution: Categorical | MultiCategorical | SquashedGaussian,
    trace: Callable[..., VTrace],
    group: LearnerGroup = SINGLE,
    scale: float = 1.0,
) -> StepTargets:
    """The targets of a batch, or of a share of one of a `group` of learners. trace: of `ActorCriticAlgorithm`"""
    grid = make_grid(batch.lengths_B)
    log_pi, _ = distribution.evaluate(outputs[grid.step_rows], batch.actions)
    discounts = get_discounts(batch, config.discount)
    log_rhos = log_pi - batch.log_probabilities
    per_step = torch.stack([log_rhos, discounts, batch.rewards, torch.ones_like(batch.rewards)])
    log_rhos_TB, discounts_TB, rewards_TB, mask_TB = grid.spread(per_step)
    traced = trace(log_rhos_TB, discounts_TB, rewards_TB, grid.spread_rows(values), mask_TB, config)
    advantages = grid.collect(traced.advantages_TB)
    advantages = standardize(advantages, group) if config.normalize_advantages else advantages / scale
    return StepTargets(batch.log_probabilities, advantages, grid.collect(traced.targets_TB))


def compute_losses(
    outputs: Tensor,  # of the distribution, [N, ...], differentiable as `values` [N]
    values: Tensor,
    actions: Tensor,
    targets: StepTargets,
    config: Any,
    distribution: Categorical | MultiCategorical | SquashedGaussian,
    gain: Callable[..., Tensor],
    num_steps: int | None = None,
    scale: float = 1.0,
) -> Losses:
    """The mean gain, negative, half the mean squared error to the value targets, and the entropy bonus.

    num_steps: of all learners, where others have the other steps of the minibatch; gain: of `ActorCriticAlgorithm`
    """
    num_steps = num_steps or len(values)
    log_pi, entropies = distribution.evaluate(outputs, actions)
    entropy = entropies.sum() / num_steps
    log_ratios = log_pi - targets.log_probabilities
    policy_loss = -gain(log_ratios, targets.advantages, config).sum() / num_steps
    value_loss = 0.5 * ((values - targets.values) / scale).square().sum() / num_steps
    total = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy
    with torch.no_grad():
        ratios = log_ratios.exp()
        clip_fraction = ((ratios - 1).abs() > config.clip).sum() / num_steps
        clipped_rhos = (ratios > config.rho_bar).sum() / num_steps
        kl = (ratios - 1 - log_ratios).sum() / num_steps
    moments = compute_moments(values, targets.values, num_steps)
    return Losses(total, policy_loss, value_loss, entropy, clip_fraction, clipped_rhos, kl, moments)


class ActorCriticAlgorithm(Algorithm):
    """A policy and its values, trained together by Adam: `epochs` times over the steps of each batch, in minibatches at
    random: of steps, or of whole segments where the policy is recurrent."""

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
        self._optimizer = torch.optim.Adam(self._parameters, lr=rate, eps=1e-5, fused=True)

    @staticmethod
    @abstractmethod
    def trace(
        log_rhos_TB: Tensor,  # log π(a|x) - log μ(a|x)
        discounts_TB: Tensor,  # γ; 0 on the step that terminated the episode
        rewards_TB: Tensor,
        values_T1B: Tensor,
        mask_TB: Tensor,
        config: Any,
    ) -> VTrace:
        """Value targets and advantages."""

    @staticmethod
    @abstractmethod
    def gain(log_ratios: Tensor, advantages: Tensor, config: Any) -> Tensor:
        """What the policy maximises, of each step [N]; differentiable in log_ratios, log π / μ."""

    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        tensors = to_tensors(batch, self.device)
        targets = self.compute_targets(tensors, self.group)
        positions, num_steps = self.group.locate(batch)
        self.count_learnt(num_steps)
        if tensors.states is not None:
            for is_mine, num_steps in self.draw_segments(batch):
                yield self._step_on_segments(batch, is_mine, targets, num_steps)
            return
        step_rows = make_grid(tensors.lengths_B).step_rows
        index_of_position = torch.full((num_steps,), -1).index_copy_(0, positions, torch.arange(len(positions)))
        for _ in range(self.count_epochs(num_steps)):
            for minibatch in torch.randperm(num_steps).tensor_split(self.count_minibatches(num_steps)):
                mine = index_of_position[minibatch]  # -1: another learner has the step
                chosen = mine[mine >= 0].to(self.device)
                rows = step_rows[chosen]
                outputs, values = self.model(tensors.observations[rows])
                outputs = mask_logits(outputs, None if tensors.masks is None else tensors.masks[rows])
                losses = self._compute_losses(
                    outputs, values, tensors.actions[chosen], targets.select(chosen), len(minibatch)
                )
                yield self.take_step(self.compute_gradients(losses, len(chosen), len(minibatch), self.group))

    def is_usable(self, segment: ExperienceBatch) -> bool:
        tensors = to_tensors(segment, self.device)
        step_rows = make_grid(tensors.lengths_B).step_rows
        outputs, values = (each[step_rows] for each in evaluate_rows(self.model, tensors))
        losses = self._compute_losses(outputs, values, tensors.actions, self.compute_targets(tensors), len(step_rows))
        return not find_non_finite(self.compute_gradients(losses, len(step_rows), len(step_rows), SINGLE))

    def compute_targets(self, batch: SegmentBatch, group: LearnerGroup = SINGLE) -> StepTargets:
        """The targets of a batch by the present weights."""
        with torch.no_grad():
            outputs, values = evaluate_rows(self.model, batch)
        distribution, scale = self.model.distribution, self.value_scale
        return estimate_targets(outputs, values, batch, self._config, distribution, self.trace, group, scale)

    def _compute_losses(
        self, outputs: Tensor, values: Tensor, actions: Tensor, targets: StepTargets, num_steps: int
    ) -> Losses:
        """Of some of the `num_steps` of a minibatch, of which the other learners have the others."""
        distribution, scale = self.model.distribution, self.value_scale
        return compute_losses(
            outputs, values, actions, targets, self._loss_config, distribution, self.gain, num_steps, scale
        )

    def _step_on_segments(
        self, batch: ExperienceBatch, is_mine: np.ndarray, targets: StepTargets, num_steps: int
    ) -> Metrics:
        """A step on a minibatch of `num_steps`, of which this learner has the segments where `is_mine` (bool [s]) is
        true: perhaps none, and then its gradients are 0. Each is unrolled from its stored state."""
        unrolled = is_mine if is_mine.any() else np.arange(len(is_mine)) == 0
        selected = to_tensors(batch.select(unrolled), self.device)
        rows = make_grid(selected.lengths_B).step_rows
        outputs, values = (each[rows] for each in evaluate_rows(self.model, selected))
        chosen = torch.from_numpy(np.flatnonzero(np.repeat(is_mine, batch.lengths))).to(self.device)
        mine = slice(len(chosen))
        losses = self._compute_losses(
            outputs[mine], values[mine], selected.actions[mine], targets.select(chosen), num_steps
        )
        return self.take_step(self.compute_gradients(losses, len(chosen), num_steps, self.group))

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

    def clone_demonstrations(self) -> bool:
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
        vars(self._targets).update(state["targets"])
        self._num_learnt = state["num_learnt"]
        restore_optimizer(self._optimizer, state["optimizer"], self._config.learning_rate)


def find_non_finite(metrics: Mapping[str, float]) -> list[str]:
    """The names of the metrics that are NaN or infinite."""
    return [name for name, value in metrics.items() if not math.isfinite(value)]
