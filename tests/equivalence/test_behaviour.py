"""What plans do beside their sums: skipped layers, unequal shares, compiled modules, waiting, models built unalike, and
a gradient penalty in a Task's loss."""

from functools import partial
from typing import Any

import pytest
import torch
from cases import MODELS, SEED, build, global_batch, make, share, trained, whole_gradients
from torch import Tensor, nn

from learnable import Classifier
from programs import run_ranks
from shoal.errors import PlanError
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize


class Skipping(nn.Module):
    """Its middle layer works on odd first tokens only, and not at all where a share has none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(72, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 72)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens[:, 0])
        odd = tokens[:, :1] % 2 == 1
        return self.head(torch.where(odd, self.middle(hidden), hidden) if bool(odd.any()) else hidden)


class Routed(nn.Module):
    """Two layers of one size, of which the first token of a share chooses one; `listed`: each a block of its own."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(72, 8), nn.Linear(8, 72)
        layers = [nn.Linear(8, 8) for _ in range(2)]
        self.experts = nn.ModuleList(layers) if listed else nn.ModuleDict({"0": layers[0], "1": layers[1]})

    def forward(self, tokens: Tensor) -> Tensor:
        choice = int(tokens[0, 0] % 2)
        expert = self.experts[choice] if isinstance(self.experts, nn.ModuleList) else self.experts[str(choice)]
        return self.head(expert(self.embedding(tokens[:, 0])))


def _routed(world: World) -> list[str]:
    """What is said when two shares take other layers, which are gathered with the rest, or blocks of their own."""
    found = []
    for listed in (False, True):
        parallel = build(partial(Routed, listed), ParallelSpec(shard=True), world)
        try:
            parallel.train_step(share(_half_odd(), world.rank, 2), 0)
        except PlanError as error:
            found.append(str(error))
    return found


def test_shards_of_which_ranks_use_other_parts_are_refused_before_their_gradients_count() -> None:
    for parameters, blocks in run_ranks(_routed, 2):
        assert "experts.0.bias has a gradient on one of the data ranks 0 and 1" in parameters
        assert "parallel.dynamic=true" in parameters
        assert "data rank 0 has called the block experts.0, and data rank 1 experts.1 in its place" in blocks
        assert "use ddp" in blocks


def _in_turn(world: World, spec: ParallelSpec) -> dict[str, Tensor | None]:
    """Gradients of a step of two micro-steps, the first of which uses one layer and the second the other."""
    parallel = build(partial(Routed, True), spec, world)
    tokens, targets = global_batch(0)
    tokens[:, 0] = torch.tensor([2, 3] * 8)
    parallel.train_step(share((tokens, targets), world.rank, world.size), 0)
    return whole_gradients(parallel.named_parameters())


def test_a_shard_that_only_an_early_micro_step_uses_keeps_its_gradient() -> None:
    plan = ParallelSpec(accumulate=2)
    expected = _in_turn(World.single("cpu"), plan)
    assert all(gradient is not None for gradient in expected.values())
    for found in run_ranks(_in_turn, 2, plan.model_copy(update={"shard": True})):
        torch.testing.assert_close(found, expected)


def _half_odd() -> tuple[Tensor, Tensor]:
    """A global batch of which the second share alone has odd first tokens."""
    tokens, targets = global_batch(0)
    tokens[:, 0] = torch.tensor([2] * 8 + [3] * 8)
    return tokens, targets


def _skipped(world: World, plan: dict[str, Any]) -> dict[str, Tensor | None] | str:
    spec = ParallelSpec.parse(plan)
    example = share(tuple(torch.ones_like(tensor) for tensor in global_batch(0)), 0, world.size)
    parallel = parallelize(make(Skipping), Classifier(), spec, spec.resolve_dims(world.size), world, example, SEED)
    batch = _half_odd() if spec.dynamic else tuple(torch.zeros_like(tensor) for tensor in global_batch(0))
    try:
        parallel.train_step(share(batch, parallel.data_rank, parallel.num_data_ranks), 0)
    except PlanError as error:
        return str(error)
    return whole_gradients(parallel.named_parameters())


def _behaviour(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {"refused": _skipped(world, {}), "skipped": _skipped(world, {"dynamic": True})}
    found["skipped in shards"] = _skipped(world, {"dynamic": True, "shard": True})
    torch.manual_seed(0)
    found["indivisible"] = _refusal(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), {"data": 1, "tensor": 2}, world)
    for plan in ({}, {"shard": True}):
        parallel = build("mixture", ParallelSpec.parse(plan), world)
        batch = share(global_batch(0), world.rank, 2)
        parallel.train_step(batch, 0)
        found[f"waited {plan}"] = parallel.communication_s
        number = 5 if world.rank == 0 else 0  # a last batch of five: the second share is a filler
        few = tuple(tensor[: max(number, 1)] for tensor in batch)
        sums = parallel.evaluate(few, number)
        found[f"evaluated {plan}"] = parallel.sum_over_data_ranks(sums["loss"]).tolist()
    torch.manual_seed(world.rank)
    found["unalike"] = _refusal(nn.Linear(3, 3), {"shard": True}, world)
    torch.manual_seed(0)
    turning = nn.Linear(3, 3)
    turning.register_buffer("turns", torch.full((2,), complex(1, world.rank)))
    found["unalike in one part"] = _refusal(turning, {"shard": True}, world)
    return found


def _notes(world: World, plan: dict[str, Any]) -> dict[str, str | None]:
    """What is noted on each parameter by who made the model, after a plan has taken it."""
    model, spec = make("transformer"), ParallelSpec.parse(plan)
    for name, parameter in model.named_parameters():
        parameter.note = name  # type: ignore[attr-defined]
    degrees = spec.resolve_dims(world.size)
    parallel = parallelize(model, Classifier(), spec, degrees, world, share(global_batch(0), 0, degrees.data), SEED)
    found = {name: getattr(each, "note", None) for name, each in parallel.named_parameters()}
    parallel.close()
    return found


def _refusal(model: nn.Module, plan: dict[str, Any], world: World) -> str:
    spec = ParallelSpec.parse(plan)
    try:
        parallelize(model, Classifier(), spec, spec.resolve_dims(world.size), world, (torch.ones(4, 3), torch.ones(4)))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("size", "plan"),
    [(2, {"shard": True}), (2, {"data": 1, "tensor": 2}), (4, {"tensor": 2}), (4, {"shard": True, "pipeline": 2})],
)
def test_parameters_keep_what_is_noted_on_them(size: int, plan: dict[str, Any]) -> None:
    for found in run_ranks(_notes, size, plan):
        assert found
        assert all(note == name for name, note in found.items())


def test_behaviour() -> None:
    ranks = run_ranks(_behaviour, 2)
    expected = _skipped(World.single("cpu"), {"dynamic": True})
    assert isinstance(expected, dict)
    alone = build("mixture", ParallelSpec(), World.single("cpu"))
    alone.train_step(global_batch(0), 0)
    few = tuple(tensor[:5] for tensor in global_batch(0))
    loss = alone.evaluate(few, 5)["loss"].tolist()
    for rank, found in enumerate(ranks):
        assert "middle.weight had a gradient at first" in found["refused"]
        assert "parallel.dynamic=true" in found["refused"]
        torch.testing.assert_close(found["skipped"], expected)
        torch.testing.assert_close(found["skipped in shards"], expected)
        assert "0: has 3 outputs, which 2 ranks cannot share" in found["indivisible"]
        assert 0 < found["waited {}"] < 60
        assert 0 < found["waited {'shard': True}"] < 60
        for plan in ("{}", "{'shard': True}"):
            assert found[f"evaluated {plan}"] == pytest.approx(loss, rel=1e-5)
        assert f"weight is not the same on ranks {rank} and {1 - rank}" in found["unalike"]
        assert f"turns is not the same on ranks {rank} and {1 - rank}" in found["unalike in one part"]


def _compiled(world: World) -> list[list[float]]:
    """With the compiler's first half: what is traced, and what would break a graph, without machine code."""
    compile_with = torch.compile
    torch.compile = lambda function: compile_with(function, backend="eager")  # type: ignore[assignment]
    plans: list[dict[str, Any]] = [{}, {"shard": True}, {"data": 1, "tensor": 2}] if world.size > 1 else [{}]
    build("transformer", ParallelSpec(compile=True), world).train_step(
        share(global_batch(0), world.rank, world.size), 0
    )
    return [trained(_certain, ParallelSpec.parse({**plan, "compile": True}), world)["losses"] for plan in plans]


def _certain() -> nn.Module:
    """Without dropout, which compiled layers draw otherwise."""
    model = MODELS["transformer"]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_compiled_plans(size: int) -> None:
    expected = trained(_certain, ParallelSpec(), World.single("cpu"))["losses"]
    for losses in run_ranks(_compiled, size)[0]:
        torch.testing.assert_close(losses, expected, rtol=2e-4, atol=2e-5)


def ways(world: World) -> list[bool]:
    """Whether a plan sums through memory: with its own choice of a back end, and with a named one."""
    found = []
    for spec in (ParallelSpec(), ParallelSpec(backend="gloo")):
        model: Any = build("mixture", spec, world)
        found.append(model._shm_all_reduce is not None)
        model.close()
    return found


def test_a_back_end_that_is_named_carries_everything() -> None:
    assert run_ranks(ways, 2) == [[True, False]] * 2


# -- a gradient penalty: that of one process, or an error that says which plan has it


class Penalized(Classifier):
    def inputs(self, batch: Any) -> tuple[Any, ...]:
        self.x = batch[0].clone().requires_grad_()
        return (self.x,)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        (slope,) = torch.autograd.grad(outputs.sum(), self.x, create_graph=True)
        return super().loss(outputs, batch) + slope.square().sum(1).mean()


def _gradients(world: World, plan: dict[str, Any]) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(8, 6, generator=generator), torch.arange(8) % 3
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    spec = ParallelSpec.parse(plan)
    dims = spec.resolve_dims(world.size)
    share = batch[0].double().chunk(dims.data)[world.rank], batch[1].chunk(dims.data)[world.rank]
    parallel = parallelize(model, Penalized(), spec, dims, world, share, SEED)
    try:
        parallel.train_step(share, 0)
        return whole_gradients(parallel.named_parameters())
    finally:
        parallel.close()


def _all_plans(world: World) -> tuple[dict[str, Tensor | None], str]:
    found = _gradients(world, {"data": 2})
    with pytest.raises(PlanError) as caught:
        _gradients(world, {"data": 2, "shard": True})
    return found, str(caught.value)


def test_a_gradient_penalty_on_two_ranks() -> None:
    """With statistics of both in the first derivatives, and so sums over both in the second."""
    expected = _gradients(World.single("cpu"), {})
    for found, error in run_ranks(_all_plans, 2):
        torch.testing.assert_close(found, expected)
        assert "a second derivative (create_graph=True) needs weights that are freed after the first" in error
        assert "parallel=ddp" in error
