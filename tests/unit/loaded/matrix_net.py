"""A network of a user's own over observations that are matrices."""

import math

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, observation_shape, num_actions):
        super().__init__()
        self.layer = nn.Linear(math.prod(observation_shape), num_actions)
        self.value = nn.Linear(math.prod(observation_shape), 1)

    def forward(self, x):
        flat = torch.flatten(x, 1)
        return self.layer(flat), self.value(flat).squeeze(-1)
