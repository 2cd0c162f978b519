"""Thirty LeNets trained as a population, by each engine, beside a loop over modules and beside torch.func in a script.

All see the same batch, which is on the device. A rate is of member-steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from benchmarks.gpu.turns import Setting, Turn, take_turns
from benchmarks.ours.population_networks import make_batch, make_network
from benchmarks.result import Row, compare
from shoal.errors import ConfigError
from shoal.libs.population import Population

MEMBERS, BATCH, STEPS = 30, 64, 20
RATE, MOMENTUM = 0.01, 0.9
ENGINES = ("looped", "stacked", "vmap", "lanes")


def compute_loss(outputs: Tensor, batch: Any) -> Tensor:
    return cross_entropy(outputs, batch[1])


class Loop:
    """Modules of their own, one after another, with fused optimizers."""

    def __init__(self, members: int, device: torch.device) -> None:
        self._models = [make_network("lenet").to(device) for _ in range(members)]
        self._optimizers = [
            torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, fused=True) for model in self._models
        ]

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        for model, optimizer in zip(self._models, self._optimizers, strict=True):
            optimizer.zero_grad()
            cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()


class Script:
    """torch.func as its tutorial on ensembles has it, and SGD with momentum on the stacked parameters."""

    def __init__(self, members: int, device: torch.device) -> None:
        models = [make_network("lenet").to(device) for _ in range(members)]
        parameters, _ = stack_module_state(models)  # type: ignore[arg-type]
        self._parameters: dict[str, Tensor] = {name: each.detach() for name, each in parameters.items()}
        self._momenta = [torch.zeros_like(each) for each in self._parameters.values()]
        base: nn.Module = make_network("lenet").to("meta")

        def loss(parameters: dict[str, Tensor], inputs: Tensor, classes: Tensor) -> Tensor:
            return cross_entropy(functional_call(base, parameters, (inputs,)), classes)

        self._gradients = vmap(grad_and_value(loss), (0, None, None))

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        gradients, _ = self._gradients(self._parameters, *batch)
        torch._foreach_mul_(self._momenta, MOMENTUM)
        torch._foreach_add_(self._momenta, [gradients[name] for name in self._parameters])
        torch._foreach_add_(list(self._parameters.values()), self._momenta, alpha=-RATE)


def train(population: Population, batches: list[Any]) -> None:
    for _ in population.train(batches):
        pass


def measure(setting: Setting) -> Iterator[Row]:
    members, steps = setting.choose(MEMBERS, 2), setting.choose(STEPS, 1)
    batch = tuple(each.to(setting.device) for each in make_batch("lenet", setting.choose(BATCH, 4)))
    loop, script = Loop(members, setting.device), Script(members, setting.device)

    def repeat(step: Any) -> None:
        for _ in range(steps):
            step(batch)

    sides: dict[str, Turn] = {"loop": partial(repeat, loop.step), "script": partial(repeat, script.step)}
    chosen, misfits = "", []
    with ExitStack() as closing:
        for engine in ENGINES if setting.is_tiny else ("auto", *ENGINES):  # a trial on a CPU would compile kernels
            if setting.is_tiny and engine == "lanes":
                continue
            population = closing.enter_context(
                Population(
                    lambda: make_network("lenet"), compute_loss, members=members, optimizer="sgd", engine=engine,
                    hyper_parameters={"optimizer.learning_rate": RATE, "optimizer.momentum": MOMENTUM},
                    device=setting.device,
                )
            )  # fmt: skip
            try:
                population.step(batch)
            except ConfigError as error:
                misfits.append(f"{engine}: {error}")
                continue
            if engine == "auto" and population.choice is not None:
                chosen = f"engine: {population.choice.engine}, {population.choice.chunk} members at once"
            sides[engine] = partial(train, population, [batch] * steps)
        found = take_turns(sides, setting)
    rates = {name: [1e3 * members * steps / ms for ms in taken] for name, taken in found.items()}
    note = "; ".join(filter(None, [chosen, *misfits]))
    name, unit = f"{members} LeNets, one GPU, shared batches", "member-steps/s"
    best = "auto" if "auto" in rates else "looped"
    yield compare(name, unit, "higher", rates[best], rates["loop"], "loop of modules", 5.0, "ratio", note)
    yield compare(name, unit, "higher", rates[best], rates["script"], "torch.func script", 1.5, "ratio", note)
    for engine in ENGINES:
        if engine in rates:
            yield compare(f"{name}, engine {engine}", unit, "higher", rates[engine], rates["loop"], "loop of modules")
