"""Models built on the meta device get the weights, buffers and random numbers of one that is built in memory."""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from shoal.parallel.deferred.build import build_deferred, pause_recording
from shoal.parallel.deferred.weights import DeferredWeights
from shoal.parallel.state.module_snapshot import freeze_parameters, restore_parameters
from shoal.parallel.state.skeleton import build_skeleton, lend_values
from shoal.train.initial_weights import load_initial_weights

CPU = torch.device("cpu")


class Layers(nn.Module):
    """Layers of torch that draw their weights in various ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Linear(8, 6), nn.Embedding(5, 8, padding_idx=0)
        self.recurrent, self.attention = nn.LSTM(8, 8, 2), nn.MultiheadAttention(8, 2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
        self.norm, self.convolution = nn.BatchNorm1d(8), nn.Conv1d(4, 4, 3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


class Functions(nn.Module):
    """Functions of `nn.init`, some of which do nothing on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("orthogonal_", "trunc_normal_", "xavier_normal_", "eye_", "kaiming_uniform_"):
            setattr(self, name, nn.Linear(6, 6))
            getattr(nn.init, name)(getattr(self, name).weight)
        self.sparse, self.dirac = nn.Linear(6, 6), nn.Conv1d(4, 4, 3)
        nn.init.sparse_(self.sparse.weight, 0.5)
        nn.init.dirac_(self.dirac.weight)


class Assigned(nn.Module):
    """Values that are drawn, copied, changed and shared by hand; buffers between them take random numbers too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("noise", torch.rand(3))
        self.scaled = nn.Parameter(torch.randn(4, 4) * 0.1)
        mine = nn.Parameter(torch.empty(4, 4))
        self.mine = mine
        nn.init.normal_(mine)
        with torch.no_grad():
            self.first.bias.copy_(torch.arange(4.0))
            self.first.weight.mul_(0.5)[1:3] = 7.0
            self.first.weight[0, torch.tensor([1, 2])] = torch.zeros(2)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.target = copy.deepcopy(self.first)
        self.register_buffer("copied", self.first.weight.detach().clone())
        self.last = nn.Linear(4, 4)
        self.half = nn.Linear(4, 4).to(torch.bfloat16)


def build_lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    model(torch.zeros(1, 4))
    return model


def build_both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, DeferredWeights]:
    """The model in memory, and on the meta device with its weights."""
    torch.manual_seed(3)
    expected = make()
    torch.rand(1)
    torch.manual_seed(3)
    return expected, *build_deferred(make)


@pytest.mark.parametrize("make", [Layers, Functions, Assigned, lambda: Layers().double(), build_lazy])
def test_every_value_and_the_next_random_number_are_the_same(make: Callable[[], nn.Module]) -> None:
    expected, model, deferred = build_both(make)
    torch.manual_seed(3)
    make()
    following = torch.rand(1)
    assert any(each.is_meta for each in model.parameters())
    deferred.fill(model, CPU)
    assert torch.equal(torch.rand(1), following)
    assert_same_tensors(expected, model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]


def assert_same_tensors(expected: nn.Module, found: nn.Module) -> None:
    def tensors(model: nn.Module) -> Mapping[str, Tensor]:
        return dict([*model.named_parameters(), *model.named_buffers()])

    for name, tensor in tensors(expected).items():
        other = tensors(found)[name]
        assert (other.dtype, other.requires_grad) == (tensor.dtype, tensor.requires_grad), name
        torch.testing.assert_close(other, tensor, rtol=0, atol=0, msg=name)


def test_buffers_are_real_while_the_model_is_built() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("frequencies", 1.0 / 10.0 ** torch.arange(0, 1, 0.25), persistent=False)
            self.rates = [each.item() for each in torch.linspace(0, 0.1, 3)]

    _, model, _ = build_both(Rotary)
    assert model.frequencies.tolist() == pytest.approx([1.0, 0.5623413, 0.3162278, 0.1778279])


def reads(model: nn.Module) -> None:
    model.scale = float(model.linear.weight.norm())


def writes(model: nn.Module) -> None:
    torch.zeros(2, 2).copy_(model.linear.weight)


def draws(model: nn.Module) -> None:
    nn.init.normal_(model.linear.weight, generator=torch.Generator().manual_seed(1))


def changes(model: nn.Module) -> None:
    values = torch.zeros(2)
    with torch.no_grad():
        model.linear.bias.copy_(values)
    values += 1


def views(model: nn.Module) -> None:
    both = torch.zeros(2, 2)
    model.row, model.other = nn.Parameter(both[0]), nn.Linear(2, 2)
    both += 1


def leaves(model: nn.Module) -> None:
    values = torch.empty(2, 2)
    model.weight, model.other = nn.Parameter(values), nn.Linear(2, 2)
    values.fill_(3.0)


def refills(model: nn.Module) -> None:
    """Behind the back of the version counter."""
    values = torch.zeros(2, 2)
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    for number, layer in enumerate(model.layers):
        values.data.fill_(number + 1.0)
        layer.weight.data.copy_(values)


def seeds(model: nn.Module) -> None:
    for name in ("one", "other"):
        torch.manual_seed(1)
        setattr(model, name, nn.Linear(2, 2))


def seeds_a_buffer(model: nn.Module) -> None:
    torch.manual_seed(7)
    model.register_buffer("projection", torch.randn(2))


def builds_on_meta(model: nn.Module) -> None:
    """As `from_pretrained` does; it continues when it is refused."""
    with suppress(RuntimeError), torch.device("meta"):
        model.other = nn.Linear(2, 2)


def anchors(model: nn.Module) -> None:
    model.anchors = [model.linear.weight.detach().clone()]


def overlaps(model: nn.Module) -> None:
    model.row = nn.Parameter(model.linear.weight.detach()[0])


def hooks(model: nn.Module) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.register_hook(lambda gradient: 2 * gradient)
    model.weight = weight


def hooks_later(model: nn.Module) -> None:
    model.linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def lists(model: nn.Module) -> None:
    model.shared = [model.linear.weight]


def encloses(model: nn.Module) -> None:
    weight = model.linear.weight
    model.project = lambda x: x @ weight


TEACHERS: list[nn.Module] = []


def calls_a_teacher(model: nn.Module) -> None:
    TEACHERS[:] = [nn.Linear(2, 2)]


REFUSED = [reads, writes, draws, changes, views, leaves, refills, seeds, seeds_a_buffer, builds_on_meta, anchors]
REFUSED += [overlaps, hooks, hooks_later, lists, encloses, calls_a_teacher]


class Refused(nn.Module):
    def __init__(self, finish: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        finish(self)


@pytest.mark.parametrize("finish", REFUSED)
def test_what_needs_a_value_while_it_is_built_is_refused(finish: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        build_deferred(lambda: Refused(finish))
    assert torch.equal(torch.get_rng_state(), before)
    assert not nn.Linear(2, 2).weight.is_meta
    assert torch.empty(1, device="meta").is_meta


class Shares(nn.Module):
    """A buffer of two modules, one that has a parameter's values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.one.register_buffer("mask", torch.ones(2, 2).tril())
        self.other.register_buffer("mask", self.one.mask)
        fixed = self.one.weight.detach()
        for layer in (self.one, self.other):
            del layer.weight
            layer.register_buffer("weight", fixed)


@pytest.mark.parametrize("is_given", [False, True])
def test_a_buffer_of_two_modules_stays_one(is_given: bool) -> None:
    expected, model, deferred = build_both(Shares)
    deferred.given = expected.state_dict() if is_given else {}
    deferred.fill(model, CPU)
    assert_same_tensors(expected, model)
    assert model.one.weight is model.other.weight


class OneByOne(Mapping[str, Tensor]):
    """Weights that are read when they are asked for; none while another one is in memory."""

    def __init__(self, shapes: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tensor.shape for name, tensor in shapes.items()}
        self.read: list[str] = []
        self._last: Callable[[], Tensor | None] = lambda: None

    def __getitem__(self, name: str) -> Tensor:
        assert self._last() is None
        self.read.append(name)
        found = torch.full(self.shapes[name], float(len(name)))
        self._last = weakref.ref(found)
        return found

    def get_shape(self, name: str) -> torch.Size:
        return self.shapes[name]

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def test_weights_that_a_model_loads_are_read_one_by_one_when_it_is_filled() -> None:
    sources: list[OneByOne] = []

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Embedding(4, 3))
        model[1].weight = model[2].weight = nn.Parameter(torch.empty(3, 3))
        sources.append(OneByOne(model.state_dict()))
        with pause_recording():
            assert not nn.Linear(2, 2).weight.is_meta
        load_initial_weights(model, sources[-1])
        model.append(nn.Linear(3, 2))
        freeze_parameters(model, [name for name, _ in model.named_parameters(remove_duplicate=False)][:4])
        return model

    expected, model, deferred = build_both(make)
    assert sources[1].read == []
    assert next(model[0].buffers()).is_meta
    deferred.fill(model, CPU)
    assert sources[1].read == list(deferred.sampled) == ["0.weight", "0.bias", "2.weight"]
    assert_same_tensors(expected, model)
    assert model[1].weight is model[2].weight
    assert list(model.state_dict()) == ["3.weight", "3.bias"]
    restore_parameters(model)
    assert list(model.state_dict()) == ["3.weight", "3.bias"]
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == [
        "0.weight", "0.bias", "1.weight"
    ]  # fmt: skip
    assert model[1].weight is model[2].weight


def test_few_tensors_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are drawn twice: by the layers, and by the model."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(20))
            for layer in self.layers:
                nn.init.normal_(layer.weight, 0.02)

    *_, deferred = build_both(Twice)
    alive, most = 0, 0
    allocate = torch.UntypedStorage

    class Counted:
        def __new__(cls, size: int) -> torch.UntypedStorage:  # type: ignore[misc]
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            return allocate(size)

    def free(_: Tensor) -> None:
        nonlocal alive
        alive -= 1

    monkeypatch.setattr(torch, "UntypedStorage", Counted)
    deferred._tape.replay({region.storage: free for region in deferred._regions.values()})
    assert most == 1


def test_given_weights_are_not_drawn() -> None:
    expected, model, deferred = build_both(Assigned)
    deferred.given = expected.state_dict()
    state = torch.get_rng_state()
    deferred.fill(model, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_tensors(expected, model)


def test_weights_that_are_given_in_part_leave_the_others_as_drawn() -> None:
    expected, model, deferred = build_both(Assigned)
    deferred.given = {"scaled": torch.full((4, 4), 2.0)}
    deferred.fill(model, CPU)
    assert torch.equal(model.scaled, torch.full((4, 4), 2.0))
    with torch.no_grad():
        expected.scaled.fill_(2.0)
    assert_same_tensors(expected, model)


def test_complex_parameters_are_known_by_both_parts() -> None:
    class Complex(nn.Module):
        def __init__(self, part: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0 + part * 1j]))

    one, other = (build_deferred(partial(Complex, part))[1].fingerprint() for part in (1.0, 2.0))
    assert one["weight"] != other["weight"]


def test_fingerprints_tell_models_with_other_weights_apart() -> None:
    def find(make: Callable[[], nn.Module], seed: int) -> dict[str, str]:
        torch.manual_seed(seed)
        return build_deferred(make)[1].fingerprint()

    def scaled(by: float) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            model = Assigned()
            with torch.no_grad():
                model.last.weight.mul_(by)
            return model

        return make

    assert find(Assigned, 3) == find(Assigned, 3)
    assert find(Assigned, 3)["mine"] != find(Assigned, 4)["mine"]
    one, two = find(scaled(1.0), 3), find(scaled(2.0), 3)
    assert {name for name in one if one[name] != two[name]} == {"last.weight"}


def test_arbitrary_values_let_a_model_run_in_little_memory() -> None:
    _, model, _ = build_both(Layers)
    model.tied = nn.Linear(8, 6)
    model.tied.weight = model.linear.weight
    model.linear.weight.decays = False
    before = dict(model.named_parameters())
    with lend_values(model, CPU):
        assert model.tied.weight is model.linear.weight
        assert model.linear.weight.decays is False
        matrices = [each for each in model.parameters() if each.ndim > 1]
        assert len({each.untyped_storage().data_ptr() for each in matrices}) == 1
        assert matrices[0].untyped_storage().nbytes() <= 8 * max(each.numel() for each in matrices)
        assert all(not torch.equal(a, b) for dim in (0, 1) for a, b in pairwise(model.linear.weight.unbind(dim)))
        assert model.encoder(torch.ones(2, 3, 8)).isfinite().all()
        assert model.recurrent(torch.ones(2, 8))[0].isfinite().all()
    assert list(dict(model.named_parameters()).values()) == list(before.values())


def test_buffers_that_are_made_from_parameters_have_arbitrary_values_too() -> None:
    _, model, _ = build_both(Assigned)
    before = model.copied
    with lend_values(model, CPU):
        assert not any(each.is_meta for each in [*model.parameters(), *model.buffers()])
    assert model.copied is before


def test_arbitrary_values_without_a_number_are_refused() -> None:
    class Rooted(nn.Linear):
        def forward(self, samples: Tensor) -> Tensor:
            return samples @ self.weight.sqrt()

    _, model, _ = build_both(lambda: Rooted(4, 4))
    with lend_values(model, CPU), pytest.raises(ValueError, match="no numbers"):
        model(torch.ones(1, 4))
    assert not model._forward_hooks


def test_a_skeleton_of_a_plain_layer_has_no_memory() -> None:
    assert all(each.is_meta for each in build_skeleton(lambda: nn.Linear(4, 4)).parameters())
