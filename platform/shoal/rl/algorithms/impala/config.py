"""IMPALA's configuration. Imports no torch: launchers and the gateway read it without computing.

Used in run specs and by `algorithm`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shoal.rl.algorithm_config import AlgorithmConfig


class ImpalaConfig(AlgorithmConfig):
    """Names and defaults as in table D.1 of the paper, but for the optimiser: Adam, with rates for small networks.

    clip: ε; a step that is k versions old does not change the policy once π / μ has moved beyond 1 ± ε/k in the
          direction of its advantage
    """

    name: Literal["impala"] = "impala"
    discount: float = Field(default=0.99, ge=0, le=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    value_cost: float = Field(default=0.5, ge=0)
    entropy_cost: float = Field(default=0.01, ge=0)
    rho_bar: float = Field(default=1.0, gt=0)
    c_bar: float = Field(default=1.0, gt=0)
    lambda_: float = Field(default=1.0, ge=0, le=1)
    clip: float = Field(default=2.0, gt=0)
    max_grad_norm: float = Field(default=40.0, gt=0)
    normalize_advantages: bool = False

    algorithm: ClassVar[str] = "shoal.rl.algorithms.impala.algorithm:Impala"
    cores: ClassVar[tuple[str, ...]] = ("none", "gru", "lstm")
    changeable: ClassVar[tuple[str, ...]] = (
        *("discount", "learning_rate", "value_cost", "entropy_cost"),
        *("rho_bar", "c_bar", "lambda_", "clip", "max_grad_norm"),
    )
