"""A fixed policy that balances CartPole, laid into the weights of the network that every run uses.

With it episodes last their 500 steps from the first one on, so that two measurements of acting differ in nothing but
what is measured. The size of the network, and so the work of a step, is that of a policy that was learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from shoal.models.actor_critic import ActorCritic
from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.learner import Learner, model_arrays
from shoal.rl.spec import RLSpec
from shoal.weights import WeightStore
from shoal.wire import ExperienceSpec

GAINS = (0.1, 0.3, 1.0, 0.6)  # of position, velocity, angle, angular velocity: push to the side of a positive sum
SCALE = 0.1  # keeps the sum in the part of tanh that is nearly linear
SHARPNESS = 20.0  # of the choice: still a policy with doubts, like one that was learned (mean log-probability -0.46)
STILL = 1e-12  # a learning rate at which Adam cannot change the policy


def balance(model: ActorCritic) -> None:
    """Overwrite the policy: its first unit carries the weighted sum from layer to layer; the others act on nothing."""
    linear = [layer for layer in model.policy if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        linear[0].weight[0] = SCALE * torch.tensor(GAINS)
        for layer in linear[1:-1]:
            layer.weight[0].zero_()
            layer.weight[0, 0] = 1.0
        linear[-1].weight.zero_()
        linear[-1].weight[:, 0] = SHARPNESS / SCALE / 2 * torch.tensor([-1.0, 1.0])


def balancing_weights(spec: RLSpec) -> dict[str, np.ndarray]:
    """The weights of the whole network, for acting without a learner."""
    torch.manual_seed(spec.learner.seed)
    model = ActorCritic(4, 2, spec.hidden)
    balance(model)
    return model_arrays(model)


def first_weights(spec: RLSpec) -> dict[str, np.ndarray]:
    """What the network of any environment begins with."""
    environment: Any = gymnasium.make(spec.env)
    torch.manual_seed(spec.learner.seed)
    return model_arrays(
        ActorCritic(environment.observation_space.shape[0], int(environment.action_space.n), spec.hidden)
    )


def still(spec: RLSpec) -> RLSpec:
    """The same run with a learner that does all its work and changes nothing."""
    return spec.update({"algorithm": {"learning_rate": STILL}})


def write_checkpoint(spec: RLSpec, experience: ExperienceSpec, folder: Path) -> None:
    """A checkpoint in `folder` from which a learner starts with the balancing policy."""
    ledger = Ledger()
    learner = Learner(spec, experience, ExperienceQueue(spec.queue_capacity, ledger), WeightStore(), folder)
    balance(learner.model)
    learner.save()
    ledger.close()
