"""Models that are built on the meta device and sharded or split have the weights, and train, as if each rank had built
them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import MODELS as OWN
from cases import VOCABULARY, Decoder, global_batch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from known_configs import CONFIGS, make_batch
from learnable import Classifier
from programs import run_ranks
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.deferred.build import build_deferred
from shoal.parallel.pipeline import model as pipeline
from shoal.train.initial_weights import find_initial_weights, load_initial_weights

SAMPLES = 8
WIDTH = 64
NUM_LAYERS = 8
TENSOR, PIPELINE = {"data": 1, "tensor": 2}, {"data": 1, "pipeline": 2}


class Rooted(nn.Module):
    """Its weights are positive: arbitrary ones give no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, VOCABULARY)
        with torch.no_grad():
            self.embedding.weight.abs_()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.up(self.embedding.weight.sqrt()[tokens]).relu())[:, -1]


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if self.slope > 0 else x


class Gated(Rooted):
    """What it calls follows from the value of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.gate(self.up(self.embedding(tokens))))[:, -1]


class Unregistered(Decoder):
    """With a parameter that no call of `register_parameter` has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Module()
        self.scale._parameters["factor"] = nn.Parameter(torch.rand(8))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)
        return logits * self.scale.get_parameter("factor").mean()


def make_chain() -> nn.Module:
    """Of layers that are equally large, with biases that are small."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(NUM_LAYERS)))


MODELS: dict[str, Callable[[], nn.Module]] = {**OWN, "unregistered": Unregistered}


@dataclass
class Case:
    """A model under a plan. given: its weights are read instead of drawn."""

    model: str
    degrees: dict[str, Any]
    given: bool = False
    options: dict[str, Any] = field(default_factory=dict)


OF_TWO = {
    "fsdp in bf16": Case("llama", {"shard": True}, options={"precision": "bf16_params"}),
    "tensor qwen": Case("qwen", TENSOR),
    "pipeline t5": Case("t5", PIPELINE),
    "tensor given": Case("transformer", TENSOR, given=True),
    "pipeline given": Case("unregistered", PIPELINE, given=True),
}
MORE_OF_TWO = {
    **{f"fsdp {name}": Case(name, {"shard": True}) for name in CONFIGS},
    **{f"tensor {name}": Case(name, TENSOR) for name in ("gpt2", "bert", "t5")},
    **{f"pipeline {name}": Case(name, PIPELINE) for name in ("mixtral", "gpt2", "vit")},
}
OF_FOUR = {
    "hybrid": Case("mixture", {"shard": True, "replicate": 2}),
    "fsdp x tensor": Case("transformer", {"shard": True, "tensor": 2}),
    "fsdp x tensor given": Case("transformer", {"shard": True, "tensor": 2}, given=True),
    "ddp x tensor": Case("mixture", {"data": 2, "tensor": 2}),
    "fsdp x pipeline": Case("decoder", {"shard": True, "pipeline": 2}, options={"schedule": "interleaved_1f1b"}),
    "ddp x pipeline": Case("mixture", {"data": 2, "pipeline": 2}),
    "pipeline x tensor": Case("transformer", {"data": 1, "pipeline": 2, "tensor": 2}),
}
OF_EIGHT = {
    "hybrid x tensor": Case("transformer", {"data": 4, "shard": True, "replicate": 2, "tensor": 2}),
    "fsdp x pipeline x tensor": Case("transformer", {"shard": True, "pipeline": 2, "tensor": 2}),
}


def _train(case: Case, world: World, layouts: list[Any], *, is_deferred: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, with the state of the generator, and weights.

    layouts: the stages of a pipeline, which are measured anew each time otherwise: found, or to be used
    """
    make = CONFIGS.get(case.model) or MODELS[case.model]
    spec = ParallelSpec(**case.degrees, **case.options)
    degrees = spec.resolve_dims(world.size)
    data_rank = degrees.coordinates(world.rank).data

    def share(seed: int) -> tuple[Tensor, ...]:
        batch = make_batch(case.model, SAMPLES, seed) if case.model in CONFIGS else global_batch(seed)
        return tuple(each.chunk(degrees.data)[data_rank] for each in batch)

    batches = [share(step) for step in range(2)]
    given: dict[str, Tensor] = {}
    if case.given:
        torch.manual_seed(9)
        given = {name: torch.rand_like(each) for name, each in make().state_dict().items()}
    torch.manual_seed(5)
    model, deferred = build_deferred(make) if is_deferred else (make(), None)
    if deferred is not None:
        deferred.given = find_initial_weights(model, given) if given else {}
    elif given:
        load_initial_weights(model, given)

    def partition(*args: Any) -> Any:
        layouts.append(found(*args) if is_deferred else layouts[0])
        return layouts[-1]

    found = pipeline.partition_model
    with patch.object(pipeline, "partition_model", partition):
        parallel = parallelize(model, Classifier(), spec, degrees, world, batches[0], 0, deferred)
    optimizer = torch.optim.AdamW([each for _, each in parallel.named_parameters()], 0.01)
    state = torch.zeros(()) if given else torch.get_rng_state()  # nothing is drawn for weights that are read
    losses = [float(state.double().sum())]
    for step, batch in enumerate(batches):
        losses.append(float(parallel.train_step(batch, step)))
        optimizer.step()
        parallel.on_optimizer_step()
    parallel.close()
    assert deferred is None or deferred.eager_reason == ""
    return losses, parallel.full_weights()


def _compare(world: World, cases: dict[str, Case]) -> list[tuple[str, bool, bool]]:
    found = []
    for name, case in cases.items():
        layouts: list[Any] = []
        losses, others = _train(case, world, layouts, is_deferred=True)
        expected, weights = _train(case, world, layouts, is_deferred=False)
        same = weights.keys() == others.keys() and all(torch.equal(weights[each], others[each]) for each in weights)
        found.append((name, same, losses == expected))
    return found


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, OF_TWO),
        pytest.param(4, OF_FOUR, marks=pytest.mark.soak),
        pytest.param(2, MORE_OF_TWO, marks=pytest.mark.soak),
        pytest.param(8, OF_EIGHT, marks=pytest.mark.soak),
    ],
)
def test_models_train_bit_for_bit_as_if_built_whole(size: int, cases: dict[str, Case]) -> None:
    if size == 2:
        pytest.importorskip("transformers")
    for rank in run_ranks(_compare, size, cases):
        assert rank == [(name, True, True) for name in cases]


def test_ten_families_have_the_weights_that_they_have_in_memory() -> None:
    pytest.importorskip("transformers")
    for name, make in CONFIGS.items():
        torch.manual_seed(5)
        expected = make()
        torch.manual_seed(5)
        model, deferred = build_deferred(make)
        assert any(each.is_meta for each in model.parameters()), name
        deferred.fill(model, torch.device("cpu"))
        weights = model.state_dict()
        assert all(torch.equal(weights[key], each) for key, each in expected.state_dict().items()), name
        buffers = dict(model.named_buffers())
        assert all(torch.equal(buffers[key], each) for key, each in expected.named_buffers()), name


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations have seen, and that are there still: the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, found)):
            if isinstance(each, Tensor):
                self._add(getattr(each, "_local_tensor", each))
        self._storages = {key: pair for key, pair in self._storages.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._storages.values()))
        return found

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if not tensor.is_meta:
            self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()


class _Regression(Classifier):
    def pipeline_cuts(self) -> list[str]:
        return [str(NUM_LAYERS // 2)]  # else the stages depend on how long layers took

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {}


def _measure(world: World, degrees: dict[str, Any]) -> int:
    model, deferred = build_deferred(make_chain)
    spec = ParallelSpec(**degrees)
    batch = torch.rand(4, WIDTH), torch.rand(4, WIDTH)
    with _LiveBytes() as live:
        parallel = parallelize(model, _Regression(), spec, spec.resolve_dims(2), world, batch, 0, deferred)
    parallel.close()
    assert deferred.eager_reason == ""
    return live.most


@pytest.mark.parametrize("degrees", [TENSOR, PIPELINE])
def test_a_rank_has_its_part_and_few_whole_tensors_at_any_time(degrees: dict[str, Any]) -> None:
    layer = WIDTH * WIDTH * 4
    for most in run_ranks(_measure, 2, degrees):
        assert layer * NUM_LAYERS // 2 <= most <= layer * (NUM_LAYERS // 2 + 3)


def _fall_back(world: World, make: Callable[[], nn.Module]) -> list[tuple[str, bool]]:
    found = []
    for degrees in (TENSOR, PIPELINE):
        torch.manual_seed(5)
        expected = make()
        torch.manual_seed(5)
        model, deferred = build_deferred(make)
        spec, batch = ParallelSpec(**degrees), global_batch(0)
        parallel = parallelize(model, Classifier(), spec, spec.resolve_dims(2), world, batch, 0, deferred)
        parallel.close()
        weights = parallel.full_weights()
        same = all(torch.equal(weights[name], each) for name, each in expected.state_dict().items() if weights)
        found.append((deferred.eager_reason.removeprefix("its plan is not found without its weights: "), same))
    return found


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Rooted, "arbitrary weights give no numbers"), (Gated, "its forward pass reads the value of a parameter")],
)
def test_a_model_whose_plan_needs_its_weights_is_filled_first(make: type[nn.Module], reason: str) -> None:
    assert run_ranks(_fall_back, 2, make) == [[(reason, True), (reason, True)]] * 2
