"""Where models can be cut, and that what lies between two cuts is the model's own forward."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import PlanError
from shoal.parallel.comm.world import World
from shoal.parallel.layers.precision import autocast
from shoal.parallel.pipeline.partition import StagePartition, partition_model
from shoal.parallel.pipeline.split_points import balance_stages, profile_splits, select_splits
from shoal.parallel.pipeline.stage_forward import StageForward, build_stage_slices, mask_parameters

CPU = torch.device("cpu")


class Squares:
    """A loss that needs no targets."""

    cuts: list[str] | None = None

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch,)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return outputs.square().mean()

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return {}

    def tensor_plan(self) -> dict[str, str] | None:
        return None

    def pipeline_cuts(self) -> list[str] | None:
        return self.cuts


class Chain(nn.Module):
    """Blocks called by forward, with code of its own before, between and after; `how` makes it harder to cut."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.full((6,), 2.0))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[0]).float()[:, None]
        begun = x = self.first(x) * self.scale
        for block in self.blocks:
            if self.how == "checkpointed":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.how == "residual":
                x = x + block(x)
            else:
                x = block(x).clamp(-0.9, 0.9) + steps / 100
        if self.how == "skip":
            x = x + begun
        if self.how == "detached skip" or (self.how == "detached skip in training" and self.training):
            x = x + begun.detach()
        return self.last(x)


def found_in(model: nn.Module, x: Tensor) -> Any:
    return profile_splits(model, lambda: model(x).square().mean(), CPU)


def layout_of(model: nn.Module, num_stages: int, learnable: Any = None) -> StagePartition:
    batch = torch.randn(3, 4)
    return partition_model(
        model, learnable or Squares(), batch, num_stages, World.single("cpu"), lambda: autocast("fp32", CPU)
    )


def test_cuts_of_a_chain() -> None:
    model = Chain()
    found = found_in(model, torch.randn(3, 4))
    assert [cut.module for cut in found.split_points] == [
        "blocks.0", "blocks.0.1", "blocks.1", "blocks.1.1", "blocks.2", "blocks.2.1", "last",
    ]  # fmt: skip
    assert found.inner["blocks.1.0"].module == "blocks.1"
    assert found.parameters["scale"] == [0]
    assert found.parameters["blocks.1.0.weight"] == [3]
    assert len(found.cost_s) == len(found.split_points) + 1
    assert all(forward_s > 0 and backward_s > 0 for forward_s, backward_s in found.cost_s)


def test_shared_modules_and_tied_weights_belong_to_several_parts() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), shared)
    found = found_in(model, torch.randn(3, 4))
    assert found.parameters == {"0.weight": [0, 4], "0.bias": [0, 4], "2.weight": [2], "2.bias": [2]}


def test_a_survey_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = found_in(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    assert found.parameters["0.bias"] == [0]
    assert found.buffers["1.running_mean"] == 1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, True, True, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("how", ["plain", "residual"])
def test_views_make_up_the_model(how: str) -> None:
    """With every other stage's parameters and results not a number."""
    torch.manual_seed(0)
    model, x = Chain(how), torch.randn(3, 4)
    expected = model(x)
    found = found_in(model, x)
    cuts = select_splits(found, 4, ["blocks.0", "blocks.1", "last"])
    gated = StageForward(model, build_stage_slices(found.calls, cuts))
    gated.filler = float("nan")
    own = [("first", "scale"), ("blocks.0",), ("blocks.1", "blocks.2"), ("last",)]
    handed: Any = None
    for stage, names in enumerate(own):
        others = {name for name, _ in model.named_parameters() if not name.startswith(names)}
        with mask_parameters(model, others, float("nan")):
            handed = gated.run(stage, (x,), handed)
    torch.testing.assert_close(handed, expected)
    more = torch.randn(5, 4)  # of another shape
    handed = None
    for stage in range(4):
        handed = gated.run(stage, (more,), handed)
    gated.remove()
    torch.testing.assert_close(handed, model(more))


def test_a_call_that_did_not_come_is_noticed() -> None:
    model, x = Chain(), torch.randn(3, 4)
    found = found_in(model, x)
    gated = StageForward(model, build_stage_slices(found.calls, select_splits(found, 2, ["blocks.2"])))
    model.blocks = model.blocks[:2]
    with pytest.raises(PlanError, match=r"blocks\.2"):
        gated.run(0, (x,), None)


class Experts(nn.Module):
    """Who works on a batch is chosen for each pass, before the cut and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.middle = nn.Linear(4, 4)

    def forward(self, x: Tensor, early: int, late: int) -> Tensor:
        return self.experts[late](self.middle(self.experts[early](x)))


def test_a_stage_runs_no_module_of_which_it_has_no_parameters() -> None:
    model, x = Experts(), torch.randn(3, 4)
    expected = model.experts[3](x)
    found = profile_splits(model, lambda: model(x, 0, 1).square().mean(), CPU)
    watched = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    gated = StageForward(model, build_stage_slices(found.calls, select_splits(found, 2, ["middle"]), watched))
    assert gated.run(1, (x, 0, 1), gated.run(0, (x, 0, 1), None)).shape == (3, 4)
    torch.testing.assert_close(gated.run(0, (x, 3, 1), None), expected)  # what nobody used is the first stage's
    for late in (0, 2):  # another stage's, and nobody's
        with pytest.raises(PlanError, match=rf"experts\.{late}'.* not called in this stage"):
            gated.run(1, (x, 0, late), torch.zeros(3, 4))


def test_stages_cost_alike() -> None:
    costs = [5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 2.0]
    for num_stages in (1, 2, 3, 8):
        begins = balance_stages(costs, num_stages)
        edges = [0, *begins, len(costs)]
        slowest = max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))
        every = itertools.combinations(range(1, len(costs)), num_stages - 1)
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *each, len(costs)])) for each in every)
        assert slowest == best
        assert len(begins) == num_stages - 1


@pytest.mark.parametrize("how", ["skip", "detached skip", "detached skip in training"])
def test_a_skip_connection_is_not_cut(how: str) -> None:
    """The graph shows the first; that the others change the loss is found by trying."""
    assert [cut.module for cut in layout_of(Chain(how), 3).split_points] == ["blocks.0", "last"]
    with pytest.raises(PlanError, match=r"handed on"):
        layout_of(Chain(how), 4)


class Repeats(nn.Module):
    """One block with running statistics, called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.block(x)
        return self.last(x)


def test_no_cut_parts_those_who_change_a_buffer() -> None:
    torch.manual_seed(0)
    model = Repeats()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layout = layout_of(model, 4)
    assert [cut.module for cut in layout.split_points] == ["block", "block.1", "last"]
    assert layout.buffers["block.1.running_mean"] == 2
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(PlanError, match=r"the buffer block\.1\.\w+ would be changed by stage \d, too"):
        layout_of(model, 5)


def test_no_stage_begins_where_evaluation_does_not_come() -> None:
    """torch's own encoder layer calls none of its parts in evaluation."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))
    found = profile_splits(model, lambda: model(torch.randn(3, 5, 4)).square().mean(), CPU)
    assert "1.norm2" in {cut.module for cut in found.split_points}
    assert [cut.module for cut in select_splits(found, 3, None)] == ["1", "2"]
    with pytest.raises(PlanError, match="not called in evaluation"):
        select_splits(found, 2, ["1.norm2"])


def test_no_stage_begins_where_the_backward_pass_recomputes() -> None:
    assert [cut.module for cut in layout_of(Chain("checkpointed"), 2).split_points] == ["last"]
    with pytest.raises(PlanError, match="without activation checkpointing"):
        layout_of(Chain("checkpointed"), 3)


def test_wanted_cuts() -> None:
    learnable = Squares()
    learnable.cuts = ["blocks.1", "last"]
    assert [cut.module for cut in layout_of(Chain(), 3, learnable).split_points] == ["blocks.1", "last"]
    learnable.cuts = ["last", "blocks.1"]
    with pytest.raises(PlanError, match="order of the calls"):
        layout_of(Chain(), 3, learnable)
    learnable.cuts = ["blocks.9", "last"]
    with pytest.raises(PlanError, match="no module of this name is called"):
        layout_of(Chain(), 3, learnable)
    learnable.cuts = ["blocks.1"]
    with pytest.raises(PlanError, match="what follows needs more"):
        layout_of(Chain("detached skip"), 2, learnable)
