"""An update with IMPALA's loss: it learns, and what is not finite changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.models.actor_critic import ActorCritic
from shoal.rl.algorithms.algorithm import NonFiniteLoss
from shoal.rl.algorithms.impala.algorithm import update
from shoal.rl.algorithms.impala.config import ImpalaConfig
from shoal.rl.algorithms.segments import build_batch


def test_an_update_that_is_not_finite_leaves_the_weights_as_they_were() -> None:
    model = ActorCritic(4, 3, (8,))
    optimizer = torch.optim.Adam(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rewards = np.array([0, 1, np.inf, 0, 1], np.float32)
    observations, actions, log_probabilities = np.ones((6, 4)), np.zeros(5, np.int64), np.full(5, -1.0, np.float32)
    batch = build_batch(observations, actions, rewards, log_probabilities, np.array([5]), np.array([False]))
    with pytest.raises(NonFiniteLoss, match="learning_rate"):
        update(model, optimizer, batch, ImpalaConfig())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_updates_learn_a_bandit() -> None:
    torch.manual_seed(0)
    model = ActorCritic(4, 2, (16,))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    random = np.random.default_rng(0)
    for _ in range(60):
        policy = torch.softmax(model(torch.ones(1, 4))[0], -1)[0].detach().numpy()
        actions = (random.random(64) < policy[1]).astype(np.int64)
        batch = build_batch(
            np.ones((128, 4)), actions, actions.astype(np.float32), np.log(policy)[actions],
            np.ones(64, np.int64), np.ones(64, bool),
        )  # fmt: skip
        update(model, optimizer, batch, ImpalaConfig())
    assert int(model.predict(torch.ones(1, 4))["action"]) == 1
    assert torch.softmax(model(torch.ones(1, 4))[0], -1)[0, 1] > 0.9
