"""The advantages of a group: answers to one prompt, each compared with the others. Called when a group closes.

Pure functions of NumPy. Legend: G rewards of a group. Where single answers of an episode have rewards r_j besides that
of its end, the group compares the totals R_i = end + Σ r_j, and a token of answer k counts what comes from k on:

    A_ik = A_i - (r_i1 + ... + r_i(k-1)) / d

with the advantage A_i of the total and the `deviation` d by which that was divided: the same baseline, of the
reward-to-go in place of the total (policy gradient theorem; §13.3 of Sutton & Barto). Without rewards of single answers
it is A_i for all tokens.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Baseline = Literal["group_mean_std", "group_mean", "leave_one_out", "global"]
SMALLEST_DEVIATION = 1e-4  # is added, as TRL does


def measure_deviation(rewards: np.ndarray, baseline: Baseline) -> float:
    """The d by which a difference of rewards becomes one of advantages: 1 but for `group_mean_std`."""
    if baseline != "group_mean_std" or len(rewards) == 1:
        return 1.0
    return float(rewards.std(ddof=1, dtype=np.float64)) + SMALLEST_DEVIATION


def compute_advantages(rewards: np.ndarray, baseline: Baseline) -> np.ndarray:
    """The advantage A_i of each answer, float32 [G], from the rewards r [G] of a group of any size.

    group_mean_std: (r_i - mean(r)) / std(r), GRPO: §4.1.2 of 2402.03300; std of a sample, divided by G - 1
    group_mean:     r_i - mean(r), Dr. GRPO: 2503.20783
    leave_one_out:  r_i - mean of the other r_j = G / (G - 1) (r_i - mean(r)), RLOO: 2402.14740
    global:         r_i - mean(r), REINFORCE++ with baseline: 2501.03262; the learner divides by the deviation of the
                    whole batch. The answer of a group of one has r_1 itself: plain REINFORCE++

    Where all rewards are equal, each advantage is 0; so it is in a group of one, but by `global`.
    """
    wide = rewards.astype(np.float64)
    num = len(wide)
    if baseline == "global" and num == 1:
        return wide.astype(np.float32)
    if not np.ptp(wide):  # rounding would leave a difference to the mean
        return np.zeros(num, np.float32)
    centred = (wide - wide.mean()) / measure_deviation(rewards, baseline)
    if baseline == "leave_one_out":
        centred *= num / (num - 1)
    advantages: np.ndarray = centred.astype(np.float32)
    return advantages
