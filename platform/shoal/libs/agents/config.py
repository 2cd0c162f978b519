"""The configurations of GRPO, RLOO and REINFORCE++, and the format of a segment of tokens. Imports no torch.

Read by launchers, by the gateway, which computes advantages when a group closes, and by the learner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from shoal.extend.rl import AlgorithmConfig
from shoal.libs.agents.baselines import Baseline
from shoal.wire.experience_spec import ExperienceSpec, ExtraSpec, PolicySpec, TensorSpec

TRAINS, ADVANTAGE = "trains", "advantage"  # extras of a segment


def describe_tokens(vocabulary: int, segment_length: int) -> ExperienceSpec:
    """The format of a segment of tokens: observations int32 [L+1] are tokens, actions int32 [L] the ones that follow.

    trains:    bool [L+1], of each observation whether the action after it is trained; false for the last
    advantage: float32 [L+1], of each observation that of the action after it; the last is that of the whole episode

    rewards [L] are 0 but the last one, that of the episode; log_probabilities [L] are those of the sampler at its
    temperature, 0 where nothing is trained; versions [L] are there those of the segment's newest trained token.
    """
    token = TensorSpec("int32", (), 0, vocabulary - 1)
    trains = ExtraSpec(TRAINS, TensorSpec("bool"), "observation")
    advantage = ExtraSpec(ADVANTAGE, TensorSpec("float32"), "observation")
    return ExperienceSpec(token, token, segment_length, PolicySpec("tokens", "", ()), (trains, advantage))


class PolicyGradientTextConfig(AlgorithmConfig):
    """What GRPO, RLOO and REINFORCE++ have in common: a language model, a step of AdamW for each batch, one loss.

    pretrained:      the model: a folder, a GGUF file, `org/name` in the hub's cache, or NAME@VERSION of the registry
    lora:            fields of LoraSpec, such as {"rank": 8}: adapters are trained, and are all of a version. Their
                     dropout is off, as any: the ratio π / μ is that of one policy. {}: all is trained
    learning_rate:   of AdamW, constant. 1e-6 is for all weights of a pretrained model; adapters take 1e-5 to 1e-4
    weight_decay:    of AdamW
    max_grad_norm:   of the loss's gradient
    precision:       of the computation, by autocast; weights, moments and gradients stay in fp32
    weights:         of the versions that are published, as they travel and as samplers compute: fp32 or bf16
    temperature:     the logits are divided by it, here as by the sampler
    clip, clip_high: a token teaches nothing more once π / μ is below 1 - clip or above 1 + clip_high (default: clip) in
                     the direction of its advantage; clip=null: no bounds
    rho_bar:         the most that a token counts, by π / μ, which tokens of older weights may have far from 1
    kl_cost:         weight of the divergence from the reference, for a nat and token; 0: there is no reference
    reference:       NAME@VERSION of the registry; "": the weights that the run has begun with, which are those without
                     adapters. A resumed run needs the same ones
    minibatch_tokens: tokens that are computed together, padding included: whole segments, at least one; the gradient of
                     a batch is their sum
    group_size:      answers to a prompt, which are compared
    groups_per_step: prompts whose answers are a batch
    """

    pretrained: str = ""
    lora: dict[str, Any] = Field(default={})
    learning_rate: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    precision: Literal["fp32", "bf16"] = "fp32"
    weights: Literal["fp32", "bf16"] = "fp32"
    temperature: float = Field(default=1.0, gt=0)
    clip: float | None = Field(default=0.2, gt=0)
    clip_high: float | None = Field(default=None, gt=0)
    rho_bar: float = Field(default=2.0, gt=0)
    kl_cost: float = Field(default=0.0, ge=0)
    reference: str = ""
    minibatch_tokens: int = Field(default=4096, ge=1)
    group_size: int = Field(default=8, ge=1)
    groups_per_step: int = Field(default=8, ge=1)

    algorithm: ClassVar[str] = "shoal.libs.agents.algorithm:TextPolicyGradient"
    has_value: ClassVar[bool] = False
    has_value_head: ClassVar[bool] = False
    action_spaces: ClassVar[tuple[str, ...]] = ("Text",)
    changeable: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm", "clip", "clip_high", "rho_bar")
    search_space: ClassVar[Mapping[str, str]] = {"learning_rate": "log(3e-7,1e-5)", "clip_high": "choice(0.2,0.28)"}
    takes_all: ClassVar[bool] = True
    batch_steps: ClassVar[int] = 1
    batch_growth: ClassVar[int] = 2**30
    segment_length: ClassVar[int] = 8192
    updates_between_trials: ClassVar[int] = 10

    @property
    def baseline(self) -> Baseline:
        """What the gateway compares the rewards of a group with."""
        raise NotImplementedError

    @property
    def task_args(self) -> dict[str, Any]:
        """Of the Task that builds the network of a version."""
        dtype = "float32" if self.weights == "fp32" else "bfloat16"
        return {"model": self.pretrained, "lora": self.lora or None, "dtype": dtype}


class GRPOConfig(PolicyGradientTextConfig):
    """Shao et al., 2402.03300; the loss is divided by tokens, as DAPO does (2503.14476).

    scale_advantages: divide by the deviation of the group; false: Dr. GRPO (2503.20783)
    """

    name: Literal["grpo"] = "grpo"
    scale_advantages: bool = True

    @property
    def baseline(self) -> Baseline:
        return "group_mean_std" if self.scale_advantages else "group_mean"


class RLOOConfig(PolicyGradientTextConfig):
    """Ahmadian et al., 2402.14740: REINFORCE, without a trust region."""

    name: Literal["rloo"] = "rloo"
    clip: float | None = Field(default=None, gt=0)

    @property
    def baseline(self) -> Baseline:
        return "leave_one_out"


class ReinforcePPConfig(PolicyGradientTextConfig):
    """REINFORCE++, Hu et al., 2501.03262: advantages to mean 0 and deviation 1 over the segments of a batch."""

    name: Literal["reinforce_pp"] = "reinforce_pp"

    @property
    def baseline(self) -> Baseline:
        return "global"
