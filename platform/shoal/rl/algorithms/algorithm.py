"""One way of learning: the model, its updates from batches of experience, and its state.

Owns the interface between the learner and the algorithms, of which each has a folder: `config`, `loss` or more, and
`algorithm`. The learner takes batches, publishes weights and saves; it knows nothing of losses and optimisers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shoal.errors import ShoalError
from shoal.rl.algorithm_config import ALGORITHMS, load_named
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec
from shoal.wire import ExperienceSpec

Metrics = Mapping[str, float]


class NonFiniteLoss(ShoalError):
    """The loss or its gradient became NaN or infinite: the step was not taken."""


class Algorithm(ABC):
    """The algorithm of one learner, with fresh weights from torch's generator.

    model: its weights are published, saved and registered
    """

    model: nn.Module

    @abstractmethod
    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        """Learn from a batch; each yield is a step of an optimiser, with its metrics. Weights are published after all.

        Raises NonFiniteLoss in place of a step that would spoil the weights.
        """

    @abstractmethod
    def is_usable(self, segment: ExperienceBatch) -> bool:
        """Whether one segment by itself has a finite loss. Leaves the weights unchanged."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed learner needs; `model` is the model's."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; other entries are ignored. Settings of the present spec stay."""


def make_algorithm(spec: RLSpec, experience: ExperienceSpec) -> Algorithm:
    """The algorithm of a run."""
    made: Algorithm = load_named(ALGORITHMS[spec.algorithm.name])(spec, experience)
    return made
