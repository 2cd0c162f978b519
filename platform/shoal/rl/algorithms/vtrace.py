"""V-trace: off-policy corrected value targets and policy-gradient advantages (Espeholt et al., arXiv:1802.01561, §4.1).

Pure functions of tensors. Legend: T steps of the longest segment, B segments; segments shorter than T are padded, and
`mask` is 1 on real steps. Called by `impala.algorithm`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    """targets_TB: v_s of equation (1); advantages_TB: ρ_s (r_s + γ v_{s+1} - V(x_s)), the policy gradient's weight."""

    targets_TB: Tensor
    advantages_TB: Tensor


@torch.no_grad()
def vtrace(
    log_rhos_TB: Tensor,  # log π(a|x) - log μ(a|x)
    discounts_TB: Tensor,  # γ; 0 on the step that terminated the episode, γ on one that truncated it
    rewards_TB: Tensor,
    values_T1B: Tensor,  # [T+1, B]: V(x_s); the entry after a segment's last step is its bootstrap value
    mask_TB: Tensor,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lambda_: float = 1.0,
) -> VTrace:
    """Targets and advantages; both are 0 (targets: V) on padding.

    δ_s = ρ_s (r_s + γ V(x_{s+1}) - V(x_s)), ρ_s = min(ρ̄, π/μ), c_s = λ min(c̄, π/μ);
    v_s - V(x_s) = δ_s + γ c_s (v_{s+1} - V(x_{s+1})), the recursion of remark 1.
    """
    rhos_TB = log_rhos_TB.exp()
    clipped_rhos_TB = rhos_TB.clamp(max=rho_bar)
    values_TB, next_values_TB = values_T1B[:-1], values_T1B[1:]
    deltas_TB = clipped_rhos_TB * (rewards_TB + discounts_TB * next_values_TB - values_TB) * mask_TB
    decays_TB = discounts_TB * lambda_ * rhos_TB.clamp(max=c_bar) * mask_TB

    corrections_TB = _discounted_sums(deltas_TB, decays_TB)
    next_corrections_TB = torch.cat([corrections_TB[1:], torch.zeros_like(corrections_TB[:1])])
    next_targets_TB = next_values_TB + next_corrections_TB
    advantages_TB = clipped_rhos_TB * (rewards_TB + discounts_TB * next_targets_TB - values_TB) * mask_TB
    return VTrace(values_TB + corrections_TB, advantages_TB)


def _discounted_sums(deltas_TB: Tensor, decays_TB: Tensor) -> Tensor:
    """x_t = δ_t + d_t x_{t+1} with x_T = 0, for all t in log2(T) steps instead of T.

    After the step with stride k, x_t sums δ over [t, t + 2k) and d_t is the product of d over that span (Hillis and
    Steele 1986). Twenty operations on whole grids are several times cheaper than hundreds on their rows.
    """
    sums_TB, stride = deltas_TB, 1
    while stride < len(deltas_TB):
        sums_TB = torch.cat(
            [torch.addcmul(sums_TB[:-stride], decays_TB[:-stride], sums_TB[stride:]), sums_TB[-stride:]]
        )
        decays_TB = torch.cat([decays_TB[:-stride] * decays_TB[stride:], decays_TB[-stride:]])
        stride *= 2
    return sums_TB
