"""The distributions of actions that a policy's outputs stand for. Pure functions of tensors.

Called by the models, for what an endpoint answers, and by the algorithms' losses. Legend: N steps, A action numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

LARGEST_SQUASHED = 1.0 - 1e-6  # of tanh(u); the actor's limit is the same
LOG_STD_LIMITS = (-20.0, 2.0)  # as in the code of Haarnoja et al., and the actor's are the same


MIN_WIDE_ROW = 16  # logits, from which on torch's kernels go along rows as fast as across them
MASKED_LOGIT = -1e9  # of an action that is not allowed: its probability is 0, and its share of the entropy, too


def mask_logits(logits: Tensor, masks: Tensor | None) -> Tensor:
    """The logits [N, K] of a policy that takes allowed actions alone; masks bool [N, K]; None allows all."""
    return logits if masks is None else logits.masked_fill(~masks, MASKED_LOGIT)


class Categorical:
    """Outputs are logits [N, A] of actions [N], int64."""

    def evaluate(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probability of each action and the entropy at each step, both [N]."""
        # torch goes along the rows of [N, A] one by one: for short ones [A, N] takes half of the time.
        dim = 0 if outputs.shape[-1] < MIN_WIDE_ROW else -1
        log_policy = torch.log_softmax(outputs.T if dim == 0 else outputs, dim)
        log_pi = log_policy.gather(dim, actions.unsqueeze(dim)).squeeze(dim)
        return log_pi, -(log_policy.exp() * log_policy).sum(dim)


class MultiCategorical:
    """Independent choices: outputs [N, sum of sizes] are their logits, end to end; actions are integers [N, *shape], of
    which each has one of `sizes`, in C order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)

    def evaluate(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probability of each action and the entropy at each step, both [N]: sums over the choices."""
        log_pis, entropies = zip(
            *(
                Categorical().evaluate(logits, chosen)
                for logits, chosen in zip(outputs.split(self._sizes, -1), actions.flatten(1).long().T, strict=True)
            ),
            strict=True,
        )
        return torch.stack(log_pis).sum(0), torch.stack(entropies).sum(0)

    def choose(self, outputs: Tensor) -> Tensor:
        """The most probable action int64 [N, len(sizes)]."""
        return torch.stack([logits.argmax(-1) for logits in outputs.split(self._sizes, -1)], -1)


class SquashedGaussian(nn.Module):
    """a = center + radius · tanh(u), where u is Gaussian with a diagonal covariance; so `low` < a < `high`.

    Outputs [N, 2A] are the means of u, then the logarithms of its standard deviations. Actions are [N, *shape], where
    shape is that of `low` and `high`, nested lists.
    """

    center: Tensor
    radius: Tensor

    def __init__(self, low: Sequence[object], high: Sequence[object]) -> None:
        super().__init__()
        lowest, highest = torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)
        self.register_buffer("center", (lowest + highest) / 2, persistent=False)
        self.register_buffer("radius", (highest - lowest) / 2, persistent=False)

    def evaluate(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The log-density of each action's u and the entropy of u at each step, both [N].

        The density of u, not of a: their quotient, tanh's derivative, cancels in every ratio of policies.
        """
        means, log_stds = self.split(outputs)
        noise = (self.unsquash(actions).to(means.dtype) - means) * (-log_stds).exp()
        log_pi = (-0.5 * noise.square() - log_stds).sum(-1) - 0.5 * math.log(2 * math.pi) * means.shape[-1]
        return log_pi, (log_stds + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def sample(self, outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """tanh(u) [N, A] at u = mean + std · noise, and the logarithm of its density [N]; differentiable in outputs.

        Equation (21) of 1812.05905: log π(tanh u) = log N(u) - Σ log(1 - tanh² u), the last term as
        2 (log 2 - u - softplus(-2u)), which stays exact where tanh² u rounds to 1.
        """
        means, log_stds = self.split(outputs)
        u = means + log_stds.exp() * noise
        log_pi = (-0.5 * noise.square() - log_stds - 0.5 * math.log(2 * math.pi)).sum(-1)
        return torch.tanh(u), log_pi - (2 * (math.log(2) - u - nn.functional.softplus(-2 * u))).sum(-1)

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and logarithms of standard deviations, both [N, A]."""
        means, log_stds = outputs.chunk(2, -1)
        return means, log_stds.clamp(*LOG_STD_LIMITS)

    def squash(self, u: Tensor) -> Tensor:
        """The actions [N, *shape] float32 at u [N, A]."""
        actions: Tensor = self.center + self.radius * torch.tanh(u).reshape(-1, *self.center.shape)
        return actions.float()

    def unsquash(self, actions: Tensor) -> Tensor:
        """u [N, A] of actions [N, *shape], float64; at the bounds, where it is infinite, about 7.25."""
        return torch.atanh(self.scale(actions).clamp(-LARGEST_SQUASHED, LARGEST_SQUASHED))

    def scale(self, actions: Tensor) -> Tensor:
        """tanh(u) [N, A] of actions [N, *shape], float64: from -1 at `low` to 1 at `high`."""
        return ((actions - self.center) / self.radius).flatten(1)
