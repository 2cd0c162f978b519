"""The table of which rank holds what."""

from __future__ import annotations

from torch import nn

from shoal.cost.cost_table import format_ranks
from shoal.libs.planning.predict.placement import build_placement
from shoal.parallel import ParallelDims
from shoal.parallel.tensor.plan import TensorPlan


def _model() -> nn.Module:
    model = nn.Sequential(
        nn.Embedding(10, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 10, bias=False)
    )
    model[4].weight = model[0].weight
    return model


def test_every_layer_counts_once() -> None:
    (line,) = build_placement(_model(), ParallelDims(data=4))
    assert line.to_cells() == ("0 ... 3", "116", "whole", "0-3")
    (line,) = build_placement(_model(), ParallelDims(data=4, replicate=2, shard=True))
    assert (line.held_as, line.share) == ("1/2 sharded", 0.5)


def test_split_layers() -> None:
    degrees = ParallelDims(data=2, shard=True, tensor=2)
    placed = build_placement(_model(), degrees, TensorPlan({"1": "column", "3": "row"}))
    assert [each.to_cells() for each in placed] == [
        ("0", "40", "1/2 sharded", "0-3"),
        ("1", "40", "1/2 by column x 1/2 sharded", "0-3"),
        ("3", "36", "1/2 by row x 1/2 sharded", "0-3"),
    ]


def test_stages() -> None:
    degrees = ParallelDims(data=2, pipeline=2)
    along = {"0.weight": [0, 1], "1.weight": [0], "3.weight": [1]}
    placed = build_placement(_model(), degrees, pipeline_ranks=along)
    assert [(each.module, each.ranks) for each in placed] == [("0", (0, 1, 2, 3)), ("1", (0, 1)), ("3", (2, 3))]
    assert format_ranks([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_a_pipeline_shards_blocks_alone() -> None:
    degrees = ParallelDims(data=2, shard=True, pipeline=2)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "blocks": nn.ModuleList([block, nn.Linear(4, 4)])})
    names = [name for name, _ in model.named_parameters()]
    along = {name: [0] if name.startswith(("embedding", "blocks.0")) else [1] for name in names}
    placed = build_placement(model, degrees, pipeline_ranks=along)
    assert [each.to_cells() for each in placed] == [
        ("embedding", "32", "whole", "0-1"),
        ("blocks.0.0 ... blocks.0.2", "40", "1/2 sharded", "0-1"),
        ("blocks.1", "20", "1/2 sharded", "2-3"),
    ]
