"""One way of learning: the model, its updates from batches of experience, and its state.

Owns the interface between the learner and the algorithms, of which each has a folder: `config`, `loss` or more, and
`algorithm`. The learner takes batches, publishes weights and saves; it knows nothing of losses and optimisers.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ConfigError, ShoalError
from shoal.plugins.find import load_reference
from shoal.rl.algorithm_config import AlgorithmConfig
from shoal.rl.algorithms.normalization import Normalizer
from shoal.rl.experience.demonstrations import ShownExperience
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner_group import SINGLE, LearnerGroup, SampleShard
from shoal.rl.spec import RLSpec, network_kwargs
from shoal.wire import ExperienceSpec

Metrics = Mapping[str, float]


class NonFiniteLoss(ShoalError):
    """The loss or its gradient became NaN or infinite: the step was not taken."""


class Algorithm(ABC):
    """The algorithm of one learner, with fresh weights from torch's generator.

    model: its weights are published, saved and registered
    device: of the model and of each batch; what leaves the algorithm is on the CPU
    version: the newest published one, in whose count those of the batches are
    group: the learners that share each batch
    normalizer: the statistics of observations and rewards
    demonstrations: what others have shown; None for none, and where another learner of the group has them
    """

    model: nn.Module
    device = torch.device("cpu")
    version = 0
    group: LearnerGroup = SINGLE
    normalizer: Normalizer
    demonstrations: ShownExperience | None = None

    def prepare(self, batch: ExperienceBatch) -> ExperienceBatch:
        """A new batch as the other methods take it: in units of the statistics, unless a replay stores it."""
        return self.normalizer.prepare(batch)

    def to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    @abstractmethod
    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        """Learn from a batch; each yield is a step of an optimiser, with its metrics. Weights are published after all.

        There may be no step at all: a replay stores the batch for later ones. Raises NonFiniteLoss in place of a step
        that would spoil the weights; before the first one, the batch has had no effect.
        """

    @abstractmethod
    def is_usable(self, segment: ExperienceBatch) -> bool:
        """Whether one segment by itself has a finite loss. Leaves the weights unchanged."""

    def learn_share(self, share: SampleShard) -> None:
        """Take the step that the first learner takes, whose replay has drawn the sample. Raises RunError as it does.

        Of an algorithm without a replay, not implemented.
        """
        raise NotImplementedError

    def compute_log_ratios(self, batch: ExperienceBatch) -> np.ndarray:
        """log π(a|x) - log μ(a|x) of each step [N], of the present policy and of the one that has acted; unless the
        algorithm is off-policy, and needs no behaviour policy."""
        raise NotImplementedError

    def clone_demonstrations(self) -> bool:
        """Take in what others have shown since the last call, before an update; whether the weights have changed."""
        return False

    def configure(self, config: AlgorithmConfig) -> None:
        """Go on with the fields of `config` that are `changeable`, from the next batch on; others stay the same.

        Of an algorithm without such fields, not implemented.
        """
        raise NotImplementedError

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed learner needs; `model` is the model's, `normalizer` the statistics'."""

    def serialize(self) -> bytes:
        """The state, for a learner that joins the group."""
        buffer = io.BytesIO()
        torch.save(self.state_dict(), buffer)
        return buffer.getvalue()

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; other entries are ignored. Settings of the present spec stay."""


def restore_optimizer(optimizer: Optimizer, state: dict[str, Any], learning_rate: float) -> None:
    """Its state with the learning rate of the present spec, which may be another than that of the state."""
    optimizer.load_state_dict(state)
    set_learning_rate(optimizer, learning_rate)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the rate of all its parameters, from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def find_device(spec: RLSpec) -> torch.device:
    """The device of `learner.device`. Raises ConfigError for `cuda` where there is none."""
    has_cuda = torch.cuda.is_available()
    if spec.learner.device == "cuda" and not has_cuda:
        problem = "torch finds no GPU where the learner runs"
        raise ConfigError("learner.device", "cuda", problem, "use learner.device=cpu, or a machine with a GPU")
    return torch.device("cuda" if has_cuda and spec.learner.device != "cpu" else "cpu")


def build_model(spec: RLSpec, experience: ExperienceSpec) -> Any:
    """The network of the run, with fresh weights: the model of `algorithm.model_factory` in the sizes of the spec."""
    return load_reference(spec.model_factory)(**network_kwargs(spec, experience))


def make_algorithm(
    spec: RLSpec, experience: ExperienceSpec, folder: Path | None = None, has_replay: bool = True
) -> Algorithm:
    """The algorithm of a run. A replay that is wanted on disk lies in `folder`. has_replay: not where another learner
    draws the samples"""
    options = {} if has_replay or not spec.algorithm.is_off_policy else {"has_replay": False}
    algorithm: Algorithm = load_reference(spec.algorithm.algorithm)(spec, experience, folder, **options)
    return algorithm
