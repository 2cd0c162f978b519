"""Ranks that share a batch of trees by nodes have the gradients of one process, though none has as many trees."""

from typing import Any

import numpy as np
import pytest
import torch
from cases import whole_gradients
from torch import Tensor, nn

from learnable import Learnable
from programs import run_ranks
from shoal.batch_tree import balance_by_size
from shoal.data import Loader
from shoal.errors import DataError, PlanError
from shoal.libs.trees import Cell, Children, ChildSumLSTMCell, TreeBatch, TreeRNN
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.pipeline.model import PipelineModel

NUM_TREES = 96
BATCH_SIZE = 16
NUM_TOKENS = 7


class Trees:
    """Trees of 1 to 60 nodes, and a class for each node. num_large: so many of 400 nodes, among others of up to 4."""

    deterministic = True

    def __init__(self, num_large: int = 0) -> None:
        random = np.random.default_rng(0)
        self.sample_sizes = random.integers(1, 5 if num_large else 60, NUM_TREES)
        self.sample_sizes[:num_large] = 400
        self.trees = [
            (
                np.array([-1, *(random.integers(0, node) for node in range(1, size))]),
                random.integers(0, NUM_TOKENS, size),
            )
            for size in self.sample_sizes
        ]

    def __len__(self) -> int:
        return NUM_TREES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.trees[index]


def collate(samples: list[tuple[np.ndarray, np.ndarray]]) -> TreeBatch:
    parents, tokens = zip(*samples, strict=True)
    return TreeBatch.from_parents(parents, inputs={"token": list(tokens)}, labels={"token": list(tokens)})


class LayersCell(Cell):
    """A user's cell with a list of layers, each of which FSDP would gather by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor, children: Children) -> Tensor:
        x = self.layers[0](x)
        return torch.tanh(x + children.sum(self.layers[1](children.states[0])) if children else x)


class Network(nn.Module):
    def __init__(self, cell: Cell | None = None) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_TOKENS, 5)
        self.rnn = TreeRNN(cell or ChildSumLSTMCell(5, 6))
        self.head = nn.Linear(6, NUM_TOKENS)

    def forward(self, trees: TreeBatch) -> Tensor:
        outputs: Tensor = self.head(self.rnn(self.token(trees.inputs["token"]), trees))
        return outputs


class PerTree(Learnable):
    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch,)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        losses = nn.functional.cross_entropy(outputs, batch.labels["token"], reduction="none")
        return batch.mean_per_tree(losses).mean()


def train(
    world: World, plan: dict[str, Any], cell: type[Cell] | None = None, num_large: int = 0
) -> tuple[dict[str, Tensor | None], float, list[int]]:
    """Gradients and loss of the third step; and the nodes of this rank's share in every step."""
    spec = ParallelSpec.parse(plan)
    degrees = spec.resolve_dims(world.size)
    torch.manual_seed(0)
    source = Trees(num_large)
    example = collate([source[index] for index in range(4)])
    model = parallelize(Network(cell and cell()), PerTree(), spec, degrees, world, example, 0)
    optimizer = torch.optim.SGD([each for _, each in model.named_parameters()], lr=0.5)
    nodes, losses = [], []
    rank = degrees.coordinates(world.rank).data
    with Loader(source, batch_size=BATCH_SIZE, share=(rank, degrees.data), collate=collate, seed=1) as loader:
        for step, batch in enumerate(loader):
            losses.append(float(model.train_step(batch, step, loader.relative_share)))
            gradients = whole_gradients(model.named_parameters())
            optimizer.step()
            nodes.append(batch.num_nodes)
            if step == 2:
                break
    totals = model.sum_over_data_ranks(torch.tensor(losses)) / model.num_data_ranks
    return gradients, float(totals[-1]), nodes


def _all(world: World, plans: list[dict[str, Any]], cell: type[Cell] | None = None, num_large: int = 0) -> list[Any]:
    return [train(world, plan, cell, num_large) for plan in plans]


def test_ranks_share_trees_by_nodes_and_have_the_gradients_of_one_process() -> None:
    plans = [{}, {"shard": True}, {"accumulate": 2}, {"dynamic": True}]
    ranks = run_ranks(_all, 2, plans)
    expected, loss, nodes = train(World.single("cpu"), {})
    for index in range(len(plans)):
        shares = [ranks[rank][index][2] for rank in range(2)]
        assert [sum(each) for each in zip(*shares, strict=True)] == nodes
        assert all(abs(first - second) <= 60 for first, second in zip(*shares, strict=True))
        for rank in range(2):
            gradients, mean_loss, _ = ranks[rank][index]
            for name, gradient in expected.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=2e-4, atol=2e-6)
            assert mean_loss == pytest.approx(loss, rel=1e-5)


def test_a_rank_whose_only_sample_is_a_large_tree_takes_all_micro_steps() -> None:
    plans = [{"accumulate": 4}, {"shard": True, "accumulate": 4}]
    expected, loss, _ = train(World.single("cpu"), {}, None, 5)
    results = run_ranks(_all, 2, plans, None, 5)
    assert 400 in results[0][0][2] + results[1][0][2], "a large tree is alone on a rank"
    for gradients, mean_loss, _ in (result for rank in results for result in rank):
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=2e-4, atol=2e-6)
        assert mean_loss == pytest.approx(loss, rel=1e-5)


def test_fsdp_does_not_divide_a_users_cell() -> None:
    """Ranks differ in how often they call the cell's layers: gathers of each layer would not match."""
    expected, loss, _ = train(World.single("cpu"), {}, LayersCell)
    for ((gradients, mean_loss, _),) in run_ranks(_all, 2, [{"shard": True}], LayersCell):
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=2e-4, atol=2e-6)
        assert mean_loss == pytest.approx(loss, rel=1e-5)


def test_shares_are_balanced_by_size_and_none_is_empty() -> None:
    random = np.random.default_rng(0)
    for num_ranks in (1, 2, 3, 8):
        sizes = random.integers(0, 1000, 64)
        loads = np.bincount(balance_by_size(sizes, num_ranks), sizes, minlength=num_ranks)
        assert loads.max() <= 4 / 3 * max(sizes.sum() / num_ranks, sizes.max())
    lopsided = balance_by_size(np.array([1000, 0, 0, 0]), 4)
    assert sorted(lopsided) == [0, 1, 2, 3]  # a rank without a sample could not take the step


def read_shares(first_batch: int) -> list[list[int]]:
    """The samples of each batch, over two ranks."""
    ranks: list[list[list[int]]] = []
    for rank in range(2):
        with Loader(Trees(), batch_size=BATCH_SIZE, share=(rank, 2), collate=collate) as loader:
            loader.seek(0, first_batch * BATCH_SIZE)
            ranks.append([loader.last_indices or [] for _ in loader])
    return [sorted(first + second) for first, second in zip(*ranks, strict=True)]


def test_an_epoch_has_every_tree_once_and_resumes_in_the_middle() -> None:
    whole = read_shares(0)
    assert sorted(index for batch in whole for index in batch) == list(range(NUM_TREES))
    assert read_shares(2) == whole[2:]


def test_sizes_that_do_not_fit_are_refused() -> None:
    source = Trees()
    for wrong in (source.sample_sizes[1:], source.sample_sizes / 2, -source.sample_sizes):
        source.sample_sizes = wrong
        with pytest.raises(DataError, match="sample_sizes"):
            Loader(source, batch_size=BATCH_SIZE, collate=collate)


def test_a_pipeline_refuses_unequal_shares() -> None:
    pipeline = PipelineModel.__new__(PipelineModel)
    pipeline._num_micro_batches = 4
    with pytest.raises(PlanError, match="sample_sizes"):
        pipeline.train_step(None, 0, share=1.25)
