"""IMPALA: one learner, many actors that lag behind it (Espeholt et al., arXiv:1802.01561).

Read top to bottom: the loss as a pure function, one update, the algorithm as the learner knows it; the configuration is
in `config`. Knows no clock, device, run or Ray.
Legend: N steps, S segments laid end to end, B = S segments padded to T = the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.models.actor_critic import ActorCritic
from shoal.rl.algorithms.algorithm import Algorithm, Metrics, NonFiniteLoss
from shoal.rl.algorithms.impala.config import ImpalaConfig
from shoal.rl.algorithms.vtrace import vtrace
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, network_kwargs
from shoal.wire import ExperienceSpec


class ImpalaBatch(NamedTuple):
    """S segments laid end to end: observations [N+S, *obs] (one more a segment), actions, rewards and behaviour
    log_probabilities [N], lengths_B int64 [S], terminated_B bool [S]."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    log_probabilities: Tensor
    lengths_B: Tensor
    terminated_B: Tensor


class Losses(NamedTuple):
    """Scalars; `total` is minimised, means over the N steps."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor


def build_batch(
    observations: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    log_probabilities: np.ndarray,
    lengths: np.ndarray,
    terminated: np.ndarray,
) -> ImpalaBatch:
    """Tensors from the arrays of an experience batch; observations become float32."""
    return ImpalaBatch(
        torch.from_numpy(np.array(observations, np.float32)),
        torch.from_numpy(np.array(actions)),
        torch.from_numpy(np.array(rewards)),
        torch.from_numpy(np.array(log_probabilities)),
        torch.from_numpy(np.array(lengths)),
        torch.from_numpy(np.array(terminated)),
    )


def impala_loss(logits: Tensor, values: Tensor, batch: ImpalaBatch, config: ImpalaConfig) -> Losses:
    """The loss of §4.2: policy gradient with V-trace advantages, squared error to V-trace targets, entropy bonus.

    logits [N+S, num_actions] and values [N+S] are the learner's, for every observation; differentiable in both.
    """
    num_segments, longest = len(batch.lengths_B), int(batch.lengths_B.max())
    # Observation rows: segment b starts at sum(lengths[:b]) + b and has lengths[b] + 1 rows, the last the bootstrap.
    num_rows_B = batch.lengths_B + 1
    end_B = num_rows_B.cumsum(0)
    step_rows = torch.ones(len(values), dtype=torch.bool).index_fill_(0, end_B - 1, False).nonzero().squeeze(-1)
    column_of_row = torch.repeat_interleave(torch.arange(num_segments), num_rows_B)
    place_of_row = (torch.arange(len(values)) - (end_B - num_rows_B)[column_of_row]) * num_segments + column_of_row
    place = place_of_row[step_rows]  # of each step in the flat [T+1, B] grid

    log_policy = torch.log_softmax(logits.index_select(0, step_rows), -1)
    log_pi = log_policy.gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_policy.exp() * log_policy).sum(-1).mean()

    discounts = torch.full_like(batch.rewards, config.discount)
    last_of_terminated = (batch.lengths_B.cumsum(0) - 1)[batch.terminated_B]
    discounts[last_of_terminated] = 0.0
    per_step = torch.stack(
        [log_pi.detach() - batch.log_probabilities, discounts, batch.rewards, torch.ones_like(batch.rewards)]
    )
    size = (longest + 1) * num_segments
    grids = per_step.new_zeros(4, size).index_copy_(1, place, per_step).view(4, longest + 1, num_segments)
    values_T1B = values.new_zeros(size).index_copy_(0, place_of_row, values.detach()).view(longest + 1, num_segments)
    log_rhos_TB, discounts_TB, rewards_TB, mask_TB = grids[:, :-1]
    trace = vtrace(
        log_rhos_TB, discounts_TB, rewards_TB, values_T1B, mask_TB, config.rho_bar, config.c_bar, config.lambda_
    )
    advantages = trace.advantages_TB.flatten()[place]
    if config.normalize_advantages:
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    policy_loss = -(advantages * log_pi).mean()
    value_loss = 0.5 * (trace.targets_TB.flatten()[place] - values.index_select(0, step_rows)).square().mean()
    total = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy
    return Losses(total, policy_loss, value_loss, entropy)


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: ImpalaBatch, config: ImpalaConfig
) -> dict[str, float]:
    """One gradient step on `batch`. Returns metrics. Raises NonFiniteLoss, leaving the weights as they were."""
    metrics = _compute_gradients(model, batch, config)
    bad = [name for name, value in metrics.items() if not np.isfinite(value)]
    if bad:
        raise NonFiniteLoss(f"{', '.join(bad)} is not finite; lower algorithm.learning_rate or check the rewards")
    optimizer.step()
    return metrics


def has_finite_loss(model: nn.Module, batch: ImpalaBatch, config: ImpalaConfig) -> bool:
    """Whether `update` could learn from `batch`; the weights stay unchanged."""
    return bool(np.isfinite(list(_compute_gradients(model, batch, config).values())).all())


def _compute_gradients(model: nn.Module, batch: ImpalaBatch, config: ImpalaConfig) -> dict[str, float]:
    """Store the clipped gradients of the loss in the model; returns an update's metrics."""
    logits, values = model(batch.observations)
    losses = impala_loss(logits, values, batch, config)
    model.zero_grad(set_to_none=True)
    losses.total.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    return {
        "learner/loss": losses.total.item(),
        "learner/policy_loss": losses.policy.item(),
        "learner/value_loss": losses.value.item(),
        "learner/entropy": losses.entropy.item(),
        "learner/grad_norm": grad_norm.item(),
    }


class Impala(Algorithm):
    """One step of Adam for each batch."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec) -> None:
        assert isinstance(spec.algorithm, ImpalaConfig)
        self._config = spec.algorithm
        self.model: ActorCritic = ActorCritic(**network_kwargs(spec, experience))
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=self._config.learning_rate, fused=True)

    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        yield update(self.model, self._optimizer, _to_tensors(batch), self._config)

    def is_usable(self, segment: ExperienceBatch) -> bool:
        return has_finite_loss(self.model, _to_tensors(segment), self._config)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:  # restored with the old rate; the spec may have another
            group["lr"] = self._config.learning_rate


def _to_tensors(batch: ExperienceBatch) -> ImpalaBatch:
    return build_batch(
        batch.observations,
        batch.actions,
        batch.rewards,
        batch.log_probabilities,
        batch.lengths,
        batch.terminated,
    )
