"""Populations: members that train as each would alone, replace each other, and come back from a saved state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from member_case import Batch, Residual, accuracy, loss, make_batches, make_model, make_perceptron, train_alone
from torch import Tensor, nn

from shoal.errors import ConfigError, SpecMismatch
from shoal.libs.population import Population
from shoal.libs.population.engines.engine import EngineMisfit
from shoal.libs.population.engines.stacked import StackedEngine

# Of weights after a few steps of SGD on one machine: the same operations in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
NUM_SAMPLES = 6


def make_population(members: int = 5, factory: Any = None, **options: Any) -> Population:
    settings = {"threads": 1, "engine": "stacked", "chunk": 2, "hyper_parameters": make_values(members)} | options
    return Population(factory or partial(make_perceptron, 0.3), loss, members=members, metrics=accuracy, **settings)


def make_values(members: int) -> dict[str, Any]:
    rates = torch.linspace(0.01, 0.1, members)
    return {"optimizer.learning_rate": rates, "optimizer.momentum": 0.9}


def copy_rows(population: Population) -> dict[str, Tensor]:
    """What each member is, in the members' order."""
    group = population.group
    rows = [group.find_row(member) for member in range(population.num_members)]
    return {name: each[rows].clone() for name, each in group.rows.state().items()}


def assert_equal_members(one: Mapping[str, Tensor], other: Mapping[str, Tensor], members: Sequence[int]) -> None:
    """To the bit."""
    for name in one:
        assert torch.equal(one[name][list(members)], other[name][list(members)]), name


@pytest.mark.parametrize("order", ["shared", "own"])
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_and_threads_change_nothing(threads: int, order: Any) -> None:
    batches = make_batches(4, *([5] if order == "own" else []), NUM_SAMPLES)
    together = make_population(chunk=5, order=order)
    expected = torch.stack([together.step(batch) for batch in batches])
    with make_population(threads=threads, order=order) as population:
        results = list(population.train(batches))
        assert sorted(member for result in results for member in result.members) == [0, 1, 2, 3, 4]
        assert len(results) >= 3
        for result in results:
            torch.testing.assert_close(result.losses, expected[:, list(result.members)], **TOLERANCE)
        torch.testing.assert_close(copy_rows(population)["weights"], copy_rows(together)["weights"], **TOLERANCE)


def test_results_arrive_before_other_chunks_have_begun() -> None:
    population = make_population()
    before = copy_rows(population)
    results = population.train(make_batches(2, NUM_SAMPLES))
    first = next(results)
    others = sorted(set(range(5)) - set(first.members))
    assert_equal_members(before, copy_rows(population), others)
    assert first.losses.shape == (2, len(first.members))
    results.close()
    assert_equal_members(before, copy_rows(population), others)


def test_a_function_gives_members_their_own_batches() -> None:
    batches = make_batches(3, 5, NUM_SAMPLES)
    expected = make_population(order="own")
    list(expected.train(batches))
    population = make_population(order="own")

    def find_batches(members: Sequence[int]) -> Iterator[Batch]:
        for inputs, classes in batches:
            yield inputs[list(members)], classes[list(members)]

    list(population.train(find_batches))
    assert_equal_members(copy_rows(population), copy_rows(expected), range(5))


def test_augmentation_has_each_members_strength_and_generator() -> None:
    def augment(batch: Batch, values: Mapping[str, Tensor], generators: Sequence[torch.Generator]) -> Batch:
        inputs, classes = batch
        noise = [torch.randn(inputs.shape[1:], generator=each) for each in generators]
        return inputs + torch.stack(noise) * values["noise"].view(-1, 1, 1, 1, 1), classes

    strengths, batches = torch.arange(5) / 10, make_batches(3, NUM_SAMPLES)
    values = make_values(5) | {"augmentation.noise": strengths}
    population = make_population(factory=make_perceptron, augment=augment, hyper_parameters=values)
    losses = torch.stack([population.step(batch) for batch in batches])
    for member in range(5):
        generator = torch.Generator().manual_seed(member)
        noisy = [
            (inputs + torch.randn(inputs.shape, generator=generator) * strengths[member], classes)
            for inputs, classes in batches
        ]
        options = {"lr": float(values["optimizer.learning_rate"][member]), "momentum": 0.9}
        alone = train_alone(make_model(make_perceptron, member), noisy, options=options)
        torch.testing.assert_close(losses[:, member], alone, **TOLERANCE)


def test_exploit_copies_winners_as_they_were_and_leaves_others_untouched() -> None:
    population = make_population()
    population.step(make_batches(1, NUM_SAMPLES)[0])
    before = copy_rows(population)
    population.exploit([(0, 3), (3, 1), (4, 1)])  # 3 wins and loses
    after = copy_rows(population)
    for name, rows in after.items():
        assert torch.equal(rows, before[name][[3, 1, 2, 1, 1]])


@pytest.mark.parametrize("engine", ["looped", "stacked", "vmap"])
def test_a_member_of_nans_is_found_and_replaced_and_others_are_untouched(engine: str) -> None:
    batches = make_batches(6, NUM_SAMPLES)
    healthy, population = make_population(engine=engine), make_population(engine=engine)
    list(healthy.train(batches[:2]))
    list(population.train(batches[:2]))
    population.load_member(1, {name: each * torch.nan for name, each in population.member_state_dict(1).items()})
    for each in (healthy, population):
        list(each.train(batches[2:4]))
    assert population.find_failed() == [1]
    assert_equal_members(copy_rows(population), copy_rows(healthy), [0, 2, 3, 4])
    population.exploit([(1, 2)])
    assert population.find_failed() == []
    assert_equal_members(copy_rows(population), copy_rows(healthy), [0, 2, 3, 4])
    for name, rows in copy_rows(population).items():
        assert torch.equal(rows[1], rows[2]), name


def test_a_retired_member_rests_until_it_is_replaced() -> None:
    batches = make_batches(4, NUM_SAMPLES)
    population, others = make_population(), make_population()
    list(others.train(batches))
    before = copy_rows(population)
    population.retire(1)
    losses = population.step(batches[0])
    population.retire(1)
    assert population.retired == [1]
    assert losses.isnan().tolist() == [False, True, False, False, False]
    list(population.train(batches[1:]))
    assert_equal_members(before, copy_rows(population), [1])
    measured = population.evaluate(batches)
    assert measured["accuracy"].isnan().tolist() == [False, True, False, False, False]
    for name, rows in copy_rows(population).items():  # other chunks, other kernels: not to the bit
        torch.testing.assert_close(rows[[0, 2, 3, 4]], copy_rows(others)[name][[0, 2, 3, 4]], **TOLERANCE)
    population.exploit([(1, 4)])
    assert population.retired == []
    assert_equal_members(
        {"weights": copy_rows(population)["weights"][[1]]}, {"weights": copy_rows(population)["weights"][[4]]}, [0]
    )
    assert population.step(batches[0]).isfinite().all()


def test_a_restored_population_continues_to_the_bit() -> None:
    batches = make_batches(6, NUM_SAMPLES)
    population = make_population(engine="auto", chunk=None)
    list(population.train(batches[:3]))
    population.retire(0)
    population.set_hyper_parameters(2, {"optimizer.learning_rate": 0.5})
    state = population.state_dict()
    restored = make_population(engine="auto", chunk=None, seed=99)
    restored.load_state_dict({**state, "groups": [_copy(group) for group in state["groups"]]})
    for each in (population, restored):
        list(each.train(batches[3:]))
    assert_equal_members(copy_rows(population), copy_rows(restored), range(5))
    assert restored.retired == [0]
    assert torch.equal(
        restored.hyper_parameters["optimizer.learning_rate"], population.hyper_parameters["optimizer.learning_rate"]
    )


def _copy(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "rows": {name: each.clone() for name, each in group["rows"].items()}}


def test_a_state_of_another_population_is_refused() -> None:
    state = make_population().state_dict()
    with pytest.raises(SpecMismatch, match="other members"):
        make_population(4).load_state_dict(state)
    with pytest.raises(SpecMismatch, match=r"population.weights"):
        make_population(factory=Residual).load_state_dict(state)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("threads", [1, 2])
def test_more_members_than_fit_wait_in_host_memory_and_train_the_same(threads: int) -> None:
    batches = make_batches(4, NUM_SAMPLES)
    resident = make_population(7, chunk=1)
    row_bytes = resident.group.layout.row_bytes(1)
    with make_population(7, chunk=1, threads=threads, memory_bytes=4 * row_bytes) as population:
        assert not population.group.store.is_resident
        assert population.group.store.max_chunk <= 2
        for each in (resident, population):
            list(each.train(batches))
            each.exploit([(0, 6)])
            each.step(batches[0])
        assert_equal_members(copy_rows(population), copy_rows(resident), range(7))
        one, other = population.evaluate(batches), resident.evaluate(batches)
        assert all(torch.equal(one[name], other[name]) for name in other)
        next(population.train(batches))  # the rest is never opened: its staging rows are free again
        population.step(batches[0])


def test_members_that_do_not_fit_are_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"memory_bytes = 100: one member takes"):
        make_population(memory_bytes=100)
    available = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    with pytest.raises(ConfigError, match=r"members = 5: need .* GB of host memory"):
        make_population()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 0}, "members = 0"),
        ({"chunk": 0}, "chunk = 0"),
        ({"hyper_parameters": {"optimizer.learning_rate": [0.1, 0.2]}}, r"has \[2\] numbers for 5 members"),
        ({"hyper_parameters": {"optimizer.learning_rate": -1.0}}, "out of range"),
        ({"hyper_parameters": {"optimizer.momentum": float("nan")}}, "not finite"),
        ({"hyper_parameters": {"optimizer.rate": 0.1}}, "no such hyper-parameter"),
        ({"factory": nn.ReLU}, "no parameters"),
        ({"optimizer": "rmsprop"}, "optimizer = 'rmsprop'"),
        ({"order": "mine"}, "order = 'mine': no such order"),
        ({"hyper_parameters": {"augmentation.fade": 0.5}}, "nothing applies augmentation.fade"),
    ],
)
def test_bad_settings_are_typed_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_population(**options)


def test_a_device_that_is_not_there_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device = 'cuda'"):
        make_population(device="cuda")


def test_bad_calls_are_typed_errors() -> None:
    population = make_population(order="own")
    with pytest.raises(ConfigError, match=r"a batch is not \[5, B, ...\]"):
        population.step(make_batches(1, NUM_SAMPLES + 5)[0])
    with pytest.raises(ConfigError, match="no such hyper-parameter"):
        population.set_hyper_parameters(0, {"optimizer.beta": 1.0})
    with pytest.raises(ConfigError, match="out of range"):
        population.set_hyper_parameters(0, {"optimizer.momentum": 1.5})
    with pytest.raises(ConfigError, match="has no batch"):
        list(population.train([]))
    calls: list[Callable[[], object]] = [
        lambda: population.exploit([(0, 5)]),
        lambda: population.retire(-1),
        lambda: population.set_hyper_parameters(5, {"optimizer.momentum": 0.5}),
        lambda: population.member_state_dict(5),
        lambda: population.load_member(5, {}),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"member = (5|-1): no such member. 0 to 4"):
            call()


@pytest.mark.parametrize(
    ("wrong", "kind"), [(lambda outputs, _: outputs[:, 0], rf"a tensor \[{NUM_SAMPLES}\]"), (lambda *_: 1.0, "a float")]
)
def test_a_loss_that_is_no_scalar_is_a_typed_error(wrong: Any, kind: str) -> None:
    with (
        Population(make_perceptron, wrong, members=2, threads=1) as population,
        pytest.raises(ConfigError, match=rf"loss = '{kind}': is no scalar"),
    ):
        population.step(make_batches(1, NUM_SAMPLES)[0])


def test_a_restored_population_chooses_anew_where_its_engine_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make_batches(2, NUM_SAMPLES)
    population = make_population(engine="stacked", chunk=None)
    population.step(batches[0])
    restored = make_population(engine="auto", chunk=None)
    restored.load_state_dict(population.state_dict())

    def refuse(*_: Any) -> None:
        raise EngineMisfit("there is no compiler")

    monkeypatch.setattr(StackedEngine, "__init__", refuse)
    assert restored.step(batches[1]).isfinite().all()
    choice = restored.choice
    assert choice.reasons["stacked"] == "there is no compiler"
