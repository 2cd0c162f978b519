"""The k best members of a population as one network, whose answer is their calibrated average.

Classifiers: each member's logits are divided by a temperature, the probabilities averaged, and the mean divided by a
temperature of its own, since averaging calibrated members makes an underconfident whole (arXiv:2007.08792). All
temperatures minimise the negative log-likelihood of validation data (arXiv:1706.04599, section 4.2). Other networks:
the mean of the outputs.

Called by the flow of a population; `build` and `preprocess` are called by name when a registered ensemble is loaded.
Legend: k members, N samples, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.batch_tree import map_tensors
from shoal.extend.registry import ModelFactory
from shoal.libs.population.objective import stack_trees

LOWEST, HIGHEST = 1e-2, 1e2  # of the inverse temperatures that are tried
NUM_BISECTIONS = 40


class Ensemble(nn.Module):
    """The mean of several networks: logarithms of the averaged probabilities where `is_classifier`, else the mean of
    the outputs.

    Logarithms of probabilities are logits too: losses, metrics and an endpoint's hooks take them as a member's.
    """

    temperatures: Tensor  # [k]
    mean_temperature: Tensor  # []

    def __init__(self, members: Sequence[nn.Module], *, is_classifier: bool) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.is_classifier = is_classifier
        self.register_buffer("temperatures", torch.ones(len(members)))
        self.register_buffer("mean_temperature", torch.ones(()))

    def forward(self, *inputs: Tensor) -> Any:
        """Outputs for the inputs of one member: a tensor [N, ...], or a tree of such as a member's."""
        outputs = stack_trees([member(*inputs) for member in self.members])  # [k, N, ...]
        if not self.is_classifier:
            return map_tensors(outputs, lambda each: each.mean(0))
        return average_logits(outputs, self.temperatures, self.mean_temperature)

    def calibrate(self, logits: Tensor, targets: Tensor) -> None:
        """Fit the temperatures to the members' logits [k, N, C] and the classes [N] of validation data."""
        self.temperatures.copy_(fit_temperatures(logits, targets))
        mean = average_logits(logits, self.temperatures, torch.ones((), device=logits.device))
        self.mean_temperature.copy_(fit_temperatures(mean[None], targets)[0])

    def describe(self) -> dict[str, Any]:
        """The temperatures, for a record."""
        if not self.is_classifier:
            return {}
        return {"temperatures": self.temperatures.tolist(), "mean_temperature": float(self.mean_temperature)}


def average_logits(logits: Tensor, temperatures: Tensor, mean_temperature: Tensor) -> Tensor:
    """Logarithms of the calibrated mean probabilities [N, C] of logits [k, N, C], temperatures [k] and []."""
    probabilities = (logits / temperatures[:, None, None]).softmax(-1).mean(0)
    smallest = torch.finfo(probabilities.dtype).tiny
    return (probabilities.clamp_min(smallest).log() / mean_temperature).log_softmax(-1)


def fit_temperatures(logits: Tensor, targets: Tensor) -> Tensor:
    """The temperature [k] of each member with the lowest mean negative log-likelihood of classes [N].

    The likelihood is convex in the inverse temperature b: bisection finds where its derivative, the mean of
    (sum of p(c) z(c)) - z(target), is zero. Where it has no zero in [LOWEST, HIGHEST], the end is the answer.

    Targets are smoothed by 1 / (N + 1), as by one sample more of any class (Platt 1999, section 2.2, for two classes):
    otherwise members that are right in every sample would become certain.
    """
    logits = logits.double()
    targeted = logits.gather(-1, targets.expand(len(logits), -1)[..., None])[..., 0].mean(-1)  # [k]
    targeted += (logits.mean((-1, -2)) - targeted) / (len(targets) + 1)
    low = torch.full_like(targeted, LOWEST).log()
    high = torch.full_like(targeted, HIGHEST).log()
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        expected = ((logits * middle.exp()[:, None, None]).softmax(-1) * logits).sum(-1).mean(-1)
        is_too_sharp = expected > targeted
        low, high = torch.where(is_too_sharp, low, middle), torch.where(is_too_sharp, middle, high)
    return (-(low + high) / 2).exp().float()


def make_ensemble_factory(member: ModelFactory, num_members: int, *, is_classifier: bool) -> ModelFactory:
    """How to build the ensemble of so many networks of `member`, with the member's hooks."""
    kwargs = {"member": member.model_dump(), "num_members": num_members, "is_classifier": is_classifier}
    return ModelFactory(
        factory=f"{__name__}:build",
        kwargs=kwargs,
        preprocess=f"{__name__}:preprocess" if member.preprocess else "",
        postprocess=f"{__name__}:postprocess" if member.postprocess else "",
    )


def build(member: Mapping[str, Any], num_members: int, is_classifier: bool) -> Ensemble:
    """The network of a registered ensemble, with fresh weights. Raises ConfigError as a member's factory does."""
    factory = ModelFactory.parse(member)
    networks = [factory.build() for _ in range(num_members)]
    return Ensemble([each for each in networks if isinstance(each, nn.Module)], is_classifier=is_classifier)


def preprocess(member: Mapping[str, Any], num_members: int, is_classifier: bool) -> object:
    """The member's step before the network."""
    return ModelFactory.parse(member).make_hook("preprocess")


def postprocess(member: Mapping[str, Any], num_members: int, is_classifier: bool) -> object:
    """The member's step after the network."""
    return ModelFactory.parse(member).make_hook("postprocess")
