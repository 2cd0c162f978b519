"""SAC: each batch goes into a replay, from which every step of the optimizers draws (Haarnoja et al., 1812.05905).

External actors sample the policy, so they explore as it does. Experience of any age is welcome: the losses need no
behaviour policy. Knows no clock, run or Ray. Legend: B steps of a sample, 2 critics, A numbers of an action.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.extend.rl import (
    SINGLE,
    ExperienceBatch,
    Metrics,
    Normalizer,
    RLSpec,
    SampleShard,
    describe_encoder,
    find_device,
    network_kwargs,
    restore_optimizer,
    to_observations,
)
from shoal.libs.off_policy.configs import SACConfig
from shoal.libs.off_policy.gaussian_actor import GaussianActor, TwinCritic
from shoal.libs.off_policy.q_learning import ReplayAlgorithm, make_ring_options, require_finite
from shoal.libs.off_policy.replay import Replay, ReplaySample, collect_all
from shoal.wire import ExperienceSpec


@torch.no_grad()
def soft_targets(returns: Tensor, discounts: Tensor, next_q: Tensor, next_log_pi: Tensor, alpha: Tensor) -> Tensor:
    """r + γ (min Q̄(s', a') - α log π(a'|s')), a' by the present policy: equations (3) and (6), with two critics. [B]

    discounts [B] are 0 after termination. next_q [2, B] is by the target critics.
    """
    return returns + discounts * (next_q.min(0).values - alpha * next_log_pi)


def critic_loss(q: Tensor, targets: Tensor) -> Tensor:
    """½ E (Q(s, a) - target)², equation (5), summed over both critics; differentiable in q [2, B]."""
    return 0.5 * (q - targets).square().mean(-1).sum()


def actor_loss(log_pi: Tensor, q: Tensor, alpha: Tensor) -> Tensor:
    """E (α log π(a|s) - min Q(s, a)), equation (9); log_pi [B] and q [2, B] are differentiable in the policy."""
    return (alpha * log_pi - q.min(0).values).mean()


def temperature_loss(log_alpha: Tensor, log_pi: Tensor, target_entropy: float) -> Tensor:
    """E (-α log π(a|s) - α H̄), equation (18); differentiable in log_alpha [] alone."""
    return -(log_alpha.exp() * (log_pi.detach() + target_entropy)).mean()


class SAC(ReplayAlgorithm[Replay]):
    """`updates_per_step` steps of Adam for every inserted environment step. Only the policy's weights are published."""

    def __init__(
        self, spec: RLSpec, experience: ExperienceSpec, folder: Path | None = None, has_replay: bool = True
    ) -> None:
        assert isinstance(spec.algorithm, SACConfig)
        self._config = config = spec.algorithm
        kwargs = network_kwargs(spec, experience)
        self.device, self.normalizer = find_device(spec), Normalizer(spec, experience)
        self.model: GaussianActor = GaussianActor(**kwargs).to(self.device)
        self._num_numbers: int = kwargs["num_actions"]  # of an action
        # Frames enter the critics by an encoder, other observations flat.
        frames = describe_encoder(experience.observation) if len(experience.observation.shape) == 3 else None
        critic = TwinCritic(kwargs["observation_size"], self._num_numbers, spec.hidden, frames)
        self._critic: TwinCritic = critic.to(self.device)
        self._target = copy.deepcopy(self._critic).requires_grad_(False)
        self._log_alpha = torch.tensor(math.log(config.initial_temperature), device=self.device, requires_grad=True)
        self._target_entropy = -float(kwargs["num_actions"]) if config.target_entropy is None else config.target_entropy
        self._optimizers = {
            name: torch.optim.Adam(parameters, lr=config.learning_rate, fused=True)
            for name, parameters in (
                ("actor_optimizer", [each for each in self.model.parameters() if each.requires_grad]),
                ("critic_optimizer", list(self._critic.parameters())),
                ("temperature_optimizer", [self._log_alpha]),
            )
        }
        self._experience, self._has_replay = experience, has_replay
        if has_replay:  # otherwise another learner draws the samples
            self._replay = self.make_replay(folder)
        # Environment steps that this process can or could draw.
        self._num_inserted = self._replay.num_steps if has_replay else 0
        self._num_owed = 0.0  # steps of the optimizers that inserted steps still allow

    def make_replay(self, folder: Path | None) -> Replay:
        return Replay(self._experience, *make_ring_options(self._config, folder, priority_exponent=0.0))  # uniform

    def insert(self, batch: ExperienceBatch, replay: Replay) -> None:
        self.learn(self.make_trial(batch), is_trial=True)
        replay.insert(batch)

    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        self.insert(batch, self._replay)
        self._num_inserted += batch.num_steps
        if self._num_inserted < self._config.learning_starts:
            return
        self._num_owed += self._config.updates_per_step * batch.num_steps
        while self._num_owed >= 1 and self._replay.num_drawable:
            self._num_owed -= 1
            if metrics := self.take_step():
                yield {**metrics, "learner/replay_steps": float(self._replay.num_steps), **self.describe_share()}

    def draw(self) -> tuple[np.ndarray, SampleShard]:
        num_items = self._config.batch_size
        arrays = self.draw_arrays(
            num_items, lambda replay, num: replay.sample(num, 1, self._config.discount, beta=0.0).to_arrays()
        )
        return arrays["rows"], self._make_share(arrays, num_items)

    def make_trial(self, batch: ExperienceBatch) -> SampleShard:
        return self._make_share(collect_all(batch, 1, self._config.discount).to_arrays(), 1)

    def _make_share(self, arrays: Mapping[str, np.ndarray], num_items: int) -> SampleShard:
        """A sample, with the noise of the actions that a step draws."""
        noise = {name: self._draw_noise(len(arrays["rows"])).numpy() for name in ("next_noise", "noise")}
        return SampleShard({**self.normalizer.apply(arrays), **noise}, 0, num_items, num_items)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "normalizer": self.normalizer.state_dict(),
            "critic": self._critic.state_dict(),
            "target": self._target.state_dict(),
            "log_alpha": self._log_alpha.detach(),
            **{name: optimizer.state_dict() for name, optimizer in self._optimizers.items()},
            "replay": self._replay.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.normalizer.load_state_dict(state["normalizer"])
        self._critic.load_state_dict(state["critic"])
        self._target.load_state_dict(state["target"])
        with torch.no_grad():
            self._log_alpha.copy_(state["log_alpha"])
        for name, optimizer in self._optimizers.items():
            restore_optimizer(optimizer, state[name], self._config.learning_rate)
        if self._has_replay:
            self._replay.load_state_dict(state["replay"])

    def learn(self, share: SampleShard, *, is_trial: bool = False) -> tuple[dict[str, float], np.ndarray]:
        """One step of each optimizer: critics, which the target critics follow, policy, temperature. Losses and metrics
        are sums over the learner's items, divided by those of the whole sample. There are no errors: draws are uniform.

        The policy's loss is by the critics after their step. So they have moved, soundly, where NonFiniteLoss is of it.
        """
        arrays, distribution = dict(share.arrays), self.model.distribution
        next_noise, noise = (self.to_device(arrays.pop(name)) for name in ("next_noise", "noise"))
        sample, fraction = ReplaySample(**arrays), len(noise) / share.num_items
        observations = to_observations(sample.observations, self.device)
        following = to_observations(sample.next_observations, self.device)
        targets = self._compute_targets(sample.returns, sample.discounts, following, next_noise)
        q = self._critic(observations, self._scale(sample.actions))
        loss = critic_loss(q, targets) * fraction
        metrics = {"learner/critic_loss": loss, "learner/q_value": q.mean() * fraction}
        metrics["learner/td_error"] = (targets - q.detach()).abs().mean() * fraction
        sums = self._minimize("critic_optimizer", loss, metrics, share, is_trial)
        if not is_trial:
            with torch.no_grad():
                torch._foreach_lerp_(list(self._target.parameters()), list(self._critic.parameters()), self._config.tau)

        scaled_actions, log_pi = distribution.sample(self.model(observations), noise)
        alpha = self._log_alpha.detach().exp()
        loss = actor_loss(log_pi, self._critic(observations, scaled_actions), alpha) * fraction
        metrics = {"learner/actor_loss": loss, "learner/entropy": -log_pi.mean() * fraction}
        sums |= self._minimize("actor_optimizer", loss, metrics, share, is_trial)
        loss = temperature_loss(self._log_alpha, log_pi, self._target_entropy) * fraction
        self._minimize("temperature_optimizer", loss, {"loss": loss}, share, is_trial)
        return {**sums, "learner/temperature": alpha.item()}, np.full(share.num_items, np.nan)

    def _minimize(
        self, name: str, loss: Tensor, metrics: Mapping[str, Tensor], share: SampleShard, is_trial: bool
    ) -> dict[str, float]:
        """One step of an optimizer, with the other learners; returns the metrics of all, of which the loss is one.

        Raises NonFiniteLoss, leaving its weights, also for a gradient whose square overflows: Adam's moments would
        stay infinite, and the weights would never move again.
        """
        optimizer, group = self._optimizers[name], SINGLE if is_trial else self.group
        parameters = optimizer.param_groups[0]["params"]
        for parameter in parameters:
            parameter.grad = None  # and remains so for spare ones of a user's network
        loss.backward(inputs=parameters)  # unlike `autograd.grad`, lays gradients out as the fused optimizer needs them
        num_mine = len(share.arrays["noise"])
        sums = group.sum_gradients(parameters, metrics, num_mine, share.num_items)
        norm = torch.cat([each.grad.flatten() for each in parameters if each.grad is not None]).norm()
        require_finite([*sums.values(), norm.item()])
        if not is_trial:
            optimizer.step()
        return sums

    @torch.no_grad()
    def _compute_targets(self, returns: np.ndarray, discounts: np.ndarray, following: Tensor, noise: Tensor) -> Tensor:
        scaled_actions, log_pi = self.model.distribution.sample(self.model(following), noise)
        next_q = self._target(following, scaled_actions)
        returns_B, discounts_B = (torch.from_numpy(each).to(self.device) for each in (returns, discounts))
        return soft_targets(returns_B, discounts_B, next_q, log_pi, self._log_alpha.exp())

    def _draw_noise(self, num_items: int) -> Tensor:
        """[num_items, A], by the CPU's generator, whose state is in the checkpoint."""
        return torch.randn(num_items, self._num_numbers)

    def _scale(self, actions: np.ndarray) -> Tensor:
        return self.model.distribution.scale(torch.from_numpy(np.array(actions)).to(self.device)).float()
