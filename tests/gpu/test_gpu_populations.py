"""Members that are trained on a CUDA device: as on the CPU, and the same whether they fit or pass through slots."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal.libs.population import Population
from shoal.libs.population.augmentation import augment_batch, brightness, erase, flip, noise, shift
from shoal.libs.population.row_optimizer import RowOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # of autograd's first product in its own thread
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Batch = tuple[Tensor, Tensor]
MEMBERS = 7
# Of weights after a few steps: other orders of float32, which batch normalisation of few samples amplifies.
TOLERANCE = {"rtol": 1e-3, "atol": 2e-4}
SLEEP_CYCLES = 2_000_000  # some 1 ms, fifty times as long as a copy of a member


def make_perceptron(rate: float = 0.0) -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(rate), nn.Linear(32, 5)]
    return nn.Sequential(*layers)


def make_convolution() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 5))


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(outputs, batch[1])


def accuracy(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"accuracy": (outputs.argmax(1) == batch[1]).double().mean()}


def make_batches(count: int, samples: int = 16) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(samples, 1, 8, 8, generator=generator), torch.randint(5, (samples,), generator=generator))
        for _ in range(count)
    ]


def make_population(device: str, factory: Any = make_perceptron, members: int = MEMBERS, **options: Any) -> Population:
    values = {"optimizer.learning_rate": torch.linspace(0.005, 0.05, members)}
    settings = {"threads": 1, "hyper_parameters": values, "metrics": accuracy} | options
    return Population(factory, loss, members=members, device=device, **settings)


def copy_rows(population: Population) -> dict[str, Tensor]:
    """What each member is, in the members' order, on the host."""
    group = population.group
    rows = [group.find_row(member) for member in range(population.num_members)]
    return {name: each[rows].cpu() for name, each in group.rows.packed_state().items()}


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], what: str) -> None:
    """To the bit."""
    for name in one:
        both = one[name], other[name]
        differing = [member for member in range(len(both[0])) if not torch.equal(both[0][member], both[1][member])]
        assert not differing, f"{what}: {name} of members {differing} differs, by {(both[0] - both[1]).abs().max()}"


@pytest.fixture
def exact_convolutions() -> Iterator[None]:
    """Factors of convolutions are not rounded to 10 bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("engine", "factory"),
    [
        ("looped", make_perceptron),
        ("looped", make_convolution),
        ("stacked", make_perceptron),
        ("vmap", make_perceptron),
        ("vmap", make_convolution),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.removeprefix("make_"),
)
@pytest.mark.usefixtures("exact_convolutions")
def test_members_equal_those_of_the_cpu(device: str, engine: str, factory: Any, optimizer: Any) -> None:
    rates = {"optimizer.learning_rate": torch.linspace(1e-3, 5e-3, MEMBERS) * (10 if optimizer == "sgd" else 1)}
    momentum = {"optimizer.momentum": 0.9} if optimizer == "sgd" else {"optimizer.weight_decay": 0.01}
    # A bias before a batch normalisation has a gradient of rounding errors alone, which Adam would scale up.
    chosen = RowOptimizer(optimizer, eps=1e-3)
    options = {"optimizer": chosen, "hyper_parameters": rates | momentum, "chunk": 3}
    batches = make_batches(8)
    with (
        make_population("cpu", factory, engine="looped", **options) as expected,
        make_population(device, factory, engine=engine, **options) as population,
    ):
        for each in (expected, population):
            list(each.train(batches[:4]))
            each.exploit([(0, 6)])
            list(each.train(batches[4:]))
        choice = population.choice
        assert choice is not None
        assert choice.engine == engine
        found, right = copy_rows(population), copy_rows(expected)
        for name in ("weights", "buffers"):
            torch.testing.assert_close(found[name], right[name], **TOLERANCE, msg=partial("{}: {}".format, name))
        one, other = population.evaluate(batches), expected.evaluate(batches)
        torch.testing.assert_close(one["loss"], other["loss"], **TOLERANCE, check_dtype=False)
        assert (one["accuracy"] - other["accuracy"]).abs().max() <= 2 / 128


def test_dropout_of_every_engine_is_that_of_the_loop(device: str) -> None:
    """Masks are of the member's generator, whatever chunk it is in."""
    rows = {}
    for engine, chunk in (("looped", 1), ("stacked", 7), ("stacked", 2), ("vmap", 3)):
        with make_population(device, partial(make_perceptron, 0.4), engine=engine, chunk=chunk) as population:
            list(population.train(make_batches(5)))
            rows[engine, chunk] = copy_rows(population)["weights"]
    for way, weights in rows.items():
        torch.testing.assert_close(weights, rows["looped", 1], **TOLERANCE, msg=partial("{}: {}".format, way))


def wait_on_device(batch: Batch) -> tuple[Tensor]:
    """The model's inputs, after a kernel that takes milliseconds: a model's kernels read its weights late."""
    if batch[0].is_cuda:
        torch.cuda._sleep(SLEEP_CYCLES)
    return (batch[0],)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("fitting", [1, 2, 4])
def test_members_that_do_not_fit_are_the_same_to_the_bit(device: str, fitting: int, optimizer: Any) -> None:
    options = {"engine": "stacked", "chunk": 1, "inputs": wait_on_device, "optimizer": optimizer}
    batches = [(inputs.to(device), classes.to(device)) for inputs, classes in make_batches(8)]
    with make_population(device, **options) as resident:
        row_bytes = resident.group.layout.row_bytes(len(resident.setting.optimizer.slots))
        with make_population(device, memory_bytes=fitting * row_bytes, **options) as population:
            assert resident.group.store.is_resident
            assert not population.group.store.is_resident
            for number in range(6):
                measured = []
                for each in (resident, population):
                    list(each.train(batches[number : number + 2]))
                    first = each.evaluate(batches[:2])
                    each.exploit([(number, (number + 3) % MEMBERS)])
                    measured.append((first, each.evaluate(batches[2:3]), each.evaluate(batches[3:4])))
                for one, other in zip(*measured, strict=True):
                    assert_same(other, one, f"evaluation {number}")
                assert_same(copy_rows(population), copy_rows(resident), f"round {number}")


def test_rows_of_a_ready_chunk_can_be_read_while_others_train(device: str) -> None:
    options = {"engine": "stacked", "chunk": 1, "inputs": wait_on_device}
    with make_population(device, **options) as resident:
        row_bytes = resident.group.layout.row_bytes(1)
        list(resident.train(make_batches(2)))
        with make_population(device, memory_bytes=2 * row_bytes, **options) as population:
            for result in population.train(make_batches(2)):
                for member in result.members:
                    expected = resident.member_state_dict(member)
                    for name, tensor in population.member_state_dict(member).items():
                        assert torch.equal(tensor.cpu(), expected[name].cpu()), (member, name)


class Slow(nn.Module):
    """Its kernels take milliseconds, which its launches do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        torch.cuda._sleep(10 * SLEEP_CYCLES)
        output: Tensor = self.layer(inputs.flatten(1))
        return output


@needs_cuda
def test_the_trial_of_engines_waits_for_the_device() -> None:
    slept_ms = 0.0
    for _ in range(2):  # the first starts CUDA
        began_s = time.perf_counter()
        torch.cuda._sleep(10 * SLEEP_CYCLES)
        torch.cuda.synchronize()
        slept_ms = (time.perf_counter() - began_s) * 1e3
    with make_population("cuda", Slow, engine="looped") as population:
        population.step(make_batches(1)[0])
        choice = population.choice
        assert choice is not None
        assert min(each.ms for each in choice.trials) > 0.5 * slept_ms, (choice, slept_ms)


@pytest.mark.parametrize("factory", [make_perceptron, make_convolution])
def test_auto_takes_an_engine_that_the_device_has(device: str, factory: Any) -> None:
    with make_population(device, factory, members=32) as population:
        losses = population.step(make_batches(1)[0])
        assert losses.isfinite().all(), losses
        choice = population.choice
        assert choice is not None
        if device == "cuda":
            assert "not a CPU" in choice.reasons["lanes"], choice
            assert choice.engine in ("looped", "stacked", "vmap"), choice
            tried = {each.engine for each in choice.trials}
            assert tried == {"looped", "stacked" if factory is make_perceptron else "vmap"}, choice


def test_a_loser_continues_as_its_winner(device: str) -> None:
    rates = {"optimizer.learning_rate": 0.02, "optimizer.momentum": 0.9}
    with make_population(device, engine="stacked", chunk=7, hyper_parameters=rates) as population:
        list(population.train(make_batches(3)))
        before = copy_rows(population)
        population.exploit([(0, 3), (3, 1), (5, 2)])  # 3 wins and loses
        after = copy_rows(population)
        sources = [3, 1, 2, 1, 4, 2, 6]
        assert_same(after, {name: each[sources] for name, each in before.items()}, "copies")
        list(population.train(make_batches(3)))
        trained = copy_rows(population)["weights"]
        torch.testing.assert_close(trained[1], trained[3], **TOLERANCE)
        torch.testing.assert_close(trained[2], trained[5], **TOLERANCE)
        assert not torch.equal(trained, after["weights"])


def test_a_restored_population_continues_to_the_bit(device: str) -> None:
    options = {"factory": partial(make_perceptron, 0.3), "engine": "stacked", "chunk": 3}
    batches = make_batches(6)
    with make_population(device, **options) as population, make_population(device, **options) as other:
        list(population.train(batches[:3]))
        population.retire(2)
        state = population.state_dict()
        other.load_state_dict(
            {
                **state,
                "generators": [each.clone() for each in state["generators"]],
                "groups": [
                    {**group, "rows": {name: each.clone() for name, each in group["rows"].items()}}
                    for group in state["groups"]
                ],
            }
        )
        for each in (population, other):
            list(each.train(batches[3:]))
        assert_same(copy_rows(other), copy_rows(population), "restored")


AUGMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "shift": shift, "flip": flip, "erase": erase, "noise": noise, "brightness": brightness,
}  # fmt: skip


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_augmented_member_is_as_it_would_be_alone(device: str, name: str) -> None:
    images = torch.rand(3, 4, 1, 8, 8, generator=torch.Generator().manual_seed(0)).to(device)
    strengths = torch.tensor([0.1, 0.5, 0.9], device=device)

    def draw(members: list[int]) -> Tensor:
        generators = [torch.Generator(device).manual_seed(member) for member in members]
        values = {name: strengths[members]}
        augmented: Tensor = augment_batch(images[members], AUGMENTATIONS, values, generators)
        return augmented

    together = draw([0, 1, 2])
    assert together.device == images.device
    assert not torch.equal(together[2], images[2]), "nothing was changed"
    for member in range(3):
        assert torch.equal(draw([member])[0], together[member]), f"member {member}"


def test_augmented_members_train(device: str) -> None:
    augment = partial(augment_batch_of, AUGMENTATIONS)
    values = {"optimizer.learning_rate": 0.01, "augmentation.shift": 1.0, "augmentation.noise": 0.1}
    rows = []
    for chunk in (1, 7):
        options = {"engine": "stacked", "augment": augment, "hyper_parameters": values, "chunk": chunk}
        with make_population(device, **options) as population:
            list(population.train(make_batches(3)))
            rows.append(copy_rows(population)["weights"])
    torch.testing.assert_close(*rows, **TOLERANCE)


def augment_batch_of(augmentations: Any, batch: Any, values: Any, generators: Any) -> Any:
    return augment_batch(batch, augmentations, values, generators)
