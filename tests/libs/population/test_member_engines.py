"""Every engine against solo runs: gradients, buffers, dropout, own and shared batches; and the choice among them."""

from functools import partial
from typing import Any

import pytest
import torch
from member_case import (
    Batch,
    Branching,
    FunctionalDropout,
    Residual,
    accuracy,
    loss,
    make_batches,
    make_model,
    make_perceptron,
    make_small_convolution,
    train_alone,
)
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.libs.population import Population

# Weights after a few steps of SGD, where gradients are sums of the same products in another order. Adam divides by the
# size of a gradient, and magnifies the last digit where that is near zero: only losses are compared there.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
SEED = 5
NUM_MEMBERS = 3
NUM_STEPS = 4
NUM_SAMPLES = 6
RATES, MOMENTA = [0.05, 0.1, 0.02], [0.9, 0.0, 0.5]
FITTING = [
    ("looped", make_perceptron),
    ("stacked", make_perceptron),
    ("vmap", make_perceptron),
    ("looped", make_small_convolution),
    ("vmap", make_small_convolution),
    ("looped", Residual),
    ("vmap", Residual),
]


def make_population(factory: Any, **options: Any) -> Population:
    values = {"optimizer.learning_rate": RATES}
    if options.get("optimizer", "sgd") == "sgd":
        values["optimizer.momentum"] = MOMENTA
    return Population(
        factory, loss, members=NUM_MEMBERS, seed=SEED, metrics=accuracy, threads=1, hyper_parameters=values, **options
    )


def find_member_batches(batches: list[Batch], member: int, order: str) -> list[Batch]:
    return batches if order == "shared" else [(inputs[member], classes[member]) for inputs, classes in batches]


@pytest.mark.parametrize("order", ["shared", "own"])
@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize(("engine", "factory"), FITTING)
def test_members_equal_solo_runs(engine: str, factory: Any, rate: float, order: Any) -> None:
    factory = partial(factory, rate)
    batches = make_batches(NUM_STEPS, *([NUM_MEMBERS] if order == "own" else []), NUM_SAMPLES)
    population = make_population(factory, engine=engine, order=order)
    losses = torch.stack([population.step(batch) for batch in batches], 1)
    for member in range(NUM_MEMBERS):
        model, generator = make_model(factory, SEED + member), torch.Generator().manual_seed(SEED + member)
        options = {"lr": RATES[member], "momentum": MOMENTA[member]}
        alone = train_alone(model, find_member_batches(batches, member, order), "sgd", generator, options)
        torch.testing.assert_close(losses[member], alone, **TOLERANCE)
        for name, value in population.member_state_dict(member).items():
            torch.testing.assert_close(value, model.state_dict()[name], **TOLERANCE)


@pytest.mark.parametrize(("engine", "factory"), FITTING)
def test_evaluation_equals_each_member_alone(engine: str, factory: Any) -> None:
    population = make_population(partial(factory, 0.4), engine=engine)
    population.step(make_batches(1, NUM_SAMPLES)[0])
    batches = [*make_batches(2, 6, seed=2), *make_batches(1, 3, seed=3)]  # the last one is smaller
    generators = [generator.get_state() for generator in population.generators]
    found = population.evaluate(batches)
    assert all(map(torch.equal, generators, [generator.get_state() for generator in population.generators]))
    inputs, classes = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for member in range(NUM_MEMBERS):
        model = factory(0.4)
        model.load_state_dict(population.member_state_dict(member))
        outputs = model.eval()(inputs)
        expected = {"loss": loss(outputs, (inputs, classes)), **accuracy(outputs, (inputs, classes))}
        for name, value in expected.items():
            torch.testing.assert_close(found[name][member], value.detach().double(), **TOLERANCE)


def test_a_model_that_draws_by_itself_is_looped_with_the_members_generator() -> None:
    before, batches = torch.get_rng_state(), make_batches(NUM_STEPS, NUM_SAMPLES)
    with make_population(FunctionalDropout) as population:
        losses = torch.stack([population.step(batch) for batch in batches], 1)
        choice = population.choice
    assert choice.engine == "looped"
    assert all("random numbers" in choice.reasons[name] for name in ("stacked", "vmap"))
    assert torch.equal(torch.get_rng_state(), before)
    for member in range(NUM_MEMBERS):
        generator = torch.Generator().manual_seed(SEED + member)
        options = {"lr": RATES[member], "momentum": MOMENTA[member]}
        alone = train_alone(make_model(FunctionalDropout, SEED + member), batches, "sgd", generator, options)
        torch.testing.assert_close(losses[member], alone, **TOLERANCE)


def test_a_model_that_cannot_be_stacked_says_why_and_is_looped() -> None:
    population = make_population(Branching)
    population.step(make_batches(1, NUM_SAMPLES)[0])
    choice = population.choice
    assert choice.engine == "looped"
    assert "Branching" in choice.reasons["stacked"]
    assert "item()" in choice.reasons["vmap"]


def test_a_chosen_engine_that_does_not_fit_is_an_error_with_the_reason() -> None:
    population = make_population(make_small_convolution, engine="stacked")
    with pytest.raises(ConfigError, match=r"engine = 'stacked': does not fit the model: 0 is a Conv2d"):
        population.step(make_batches(1, NUM_SAMPLES)[0])


def test_an_unknown_engine_is_an_error() -> None:
    with pytest.raises(ConfigError, match="engine = 'quantum': no such engine"):
        make_population(make_perceptron, engine="quantum")


def test_a_model_that_fails_alone_fails_with_its_own_error() -> None:
    population = make_population(make_perceptron)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        population.step((torch.zeros(6, 7), torch.zeros(6, dtype=torch.int64)))


def test_a_loss_that_cannot_be_stacked_is_called_for_each_member() -> None:
    def odd_loss(outputs: Tensor, batch: Batch) -> Tensor:
        value = loss(outputs, batch)
        return value * 2 if float(value.detach()) > 0 else value

    members = 20  # more than those whose losses are always computed one by one
    population = Population(make_perceptron, odd_loss, members=members, engine="stacked", chunk=members, threads=1)
    batch = make_batches(1, NUM_SAMPLES)[0]
    losses = population.step(batch)
    assert not population.setting.objective.is_stacked
    for member in range(members):
        model = make_model(make_perceptron, member)
        torch.testing.assert_close(losses[member], 2 * loss(model(batch[0]), batch).detach(), **TOLERANCE)


def test_the_trial_leaves_members_and_generators_as_they_were() -> None:
    factory = partial(make_perceptron, 0.4)
    tried, chosen = make_population(factory), make_population(factory, engine="stacked", chunk=3)
    batch = make_batches(1, NUM_SAMPLES)[0]
    torch.testing.assert_close(tried.step(batch), chosen.step(batch), **TOLERANCE)
    assert all(
        torch.equal(one.get_state(), other.get_state())
        for one, other in zip(tried.generators, chosen.generators, strict=True)
    )
    torch.testing.assert_close(tried.group.rows.weights, chosen.group.rows.weights, **TOLERANCE)
    buffers = tried.group.rows.counter_rows
    assert torch.equal(buffers, torch.ones_like(buffers))  # batch norm has counted one step


def test_an_engine_with_other_gradients_than_the_loop_is_not_taken() -> None:
    class Detached(nn.Module):
        """Under torch.vmap it computes something else."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 5)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.layer(inputs.flatten(1))
            return outputs * (2 if torch._C._functorch.is_batchedtensor(outputs) else 1)

    population = make_population(Detached)
    population.step(make_batches(1, NUM_SAMPLES)[0])
    choice = population.choice
    assert "differ from the loop's" in choice.reasons["vmap"]


def test_buffers_that_a_model_assigns_are_its_members() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, inputs: Tensor) -> Tensor:
            self.seen = self.seen + self.layer.weight.detach().sum()
            outputs: Tensor = self.layer(inputs.flatten(1))
            return outputs

    population = make_population(Counting)
    expected = sum(population.group.rows.weights[:, :60].sum(1) for _ in range(1))
    population.step(make_batches(1, NUM_SAMPLES)[0])
    torch.testing.assert_close(population.group.rows.buffers["seen"], expected, **TOLERANCE)
