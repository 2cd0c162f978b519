"""Members of a population and the same members alone: models, batches and solo training, for tests of engines."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from shoal.libs.population.engines.select_engine import find_process_generator
from shoal.random_state import preserve_rng

Batch = tuple[Tensor, Tensor]


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(outputs, batch[1])


def accuracy(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"accuracy": (outputs.argmax(1) == batch[1]).double().mean()}


def make_perceptron(rate: float = 0.0) -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(rate), nn.Linear(8, 8)]
    return nn.Sequential(*layers, nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(rate), nn.Linear(8, 5))


def make_small_convolution(rate: float = 0.0) -> nn.Module:
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(rate)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(rate), nn.Linear(6, 5))


class Residual(nn.Module):
    """No chain, and one dropout layer that is called twice."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.output = nn.Linear(12, 5)
        self.norm, self.dropout = nn.LayerNorm(12), nn.Dropout(rate)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        hidden = self.dropout(torch.relu(self.first(flat)))
        output: Tensor = self.output(self.dropout(flat + self.norm(self.second(hidden))))
        return output


class FunctionalDropout(nn.Module):
    """Takes random numbers from the process' generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(12, 8), nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.output(dropout(torch.relu(self.layer(inputs.flatten(1))), 0.5, self.training))
        return output


class Branching(nn.Module):
    """What it computes depends on the numbers: no stack of members takes one branch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.layer(inputs.flatten(1))
        return hidden * 2 if float(hidden.detach().sum()) > 0 else hidden


def make_batches(count: int, *size: int, seed: int = 0) -> list[Batch]:
    """Inputs [*size, 1, 3, 4] and classes [*size]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(*size, 1, 3, 4, generator=generator), torch.randint(5, size, generator=generator))
        for _ in range(count)
    ]


def make_model(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    with preserve_rng(seed):
        return factory()


def train_alone(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: str = "sgd",
    generator: torch.Generator | None = None,
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """A solo run, whose random numbers begin where `generator` is: its losses [steps]."""
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    stepper, losses = kinds[optimizer](model.parameters(), **(options or {})), []
    with preserve_rng(0):
        if generator is not None:
            find_process_generator(torch.device("cpu")).set_state(generator.get_state())
        for batch in batches:
            stepper.zero_grad()
            value = loss(model(batch[0]), batch)
            value.backward()
            stepper.step()
            losses.append(value.detach())
    return torch.stack(losses)
