"""Which layers a tensor plan splits: those for which a part on each rank gives one process's gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learnable import Learnable, mlp
from shoal.batch_tree import tensors_of
from shoal.errors import PlanError
from shoal.parallel.tensor.plan import TensorPlan, find_tensor_plan


class Mixing(nn.Module):
    """What lies between the layers depends on all features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(torch.relu(self.down(self.up(values).softmax(-1))))


class Attention(nn.Module):
    """Hand-written, with a number of heads that each rank must halve, and keys of another width."""

    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, 3
        self.queries, self.keys = nn.Linear(6, num_heads * 3), nn.Linear(6, num_heads * 3)
        self.out = nn.Linear(num_heads * 3, 6)

    def forward(self, values: Tensor) -> Tensor:
        batch, length, _ = values.shape
        q, k = (f(values).view(batch, length, self.num_heads, self.head_dim) for f in (self.queries, self.keys))
        mixed = torch.einsum("bqhd,bkhd,bkhe->bqhe", q, k, k).reshape(batch, length, -1)
        return self.out(mixed)


class AnyWidth(Attention):
    """Heads whose width follows from what is there: their unchanged number fits, and is wrong."""

    def forward(self, values: Tensor) -> Tensor:
        q, k = (f(values).unflatten(-1, (self.num_heads, -1)) for f in (self.queries, self.keys))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhe->bqhe", scores, k).flatten(-2))


class Twice(nn.Module):
    """Layers that are called twice, with something between them that mixes the parts at the second call only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, values: Tensor) -> Tensor:
        return self.down(self.up(self.down(self.up(values).relu())).softmax(-1))


class Peeking(nn.Module):
    """The embedding's weight is also used without its layer, which a part of it would not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mlp = nn.Embedding(40, 6), mlp()

    def forward(self, values: Tensor) -> Tensor:
        embedded = self.embedding(values.abs().long())
        return self.mlp(embedded) @ self.embedding.weight[:4, :4]


class OwnDropout(nn.Dropout):
    """Which plans do not know to be one."""


class Between(nn.Module):
    """Between its layers something is used that the layers before do not make: `which` says what."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.first = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 4)
        self.scale, self.drop = nn.Parameter(torch.ones(1)), OwnDropout(0.1)

    def forward(self, values: Tensor) -> Tensor:
        entered = self.first(values)
        noise = torch.randn_like(entered[..., :1])
        hidden = self.up(entered)
        match self.which:
            case "parameter":
                hidden = hidden * self.scale
            case "parameter of another":
                hidden = hidden * self.first.weight.mean()
            case "activation":
                hidden = hidden * entered.mean(-1, keepdim=True)
            case "parameter in training":
                hidden = hidden * self.scale if self.training else hidden
            case "recomputed" if self.training:
                hidden = checkpoint(lambda each: each * self.scale, hidden, use_reentrant=True)
            case "functional dropout":
                hidden = nn.functional.dropout(hidden, 0.1, self.training)
            case "noise":
                hidden = hidden + torch.randn_like(hidden)
            case "dropout of one's own":
                hidden = self.drop(hidden)
            case "drawn before":
                hidden = hidden * noise
            case "constant":
                hidden = hidden * values.mean(-1, keepdim=True)
            case "in place":
                hidden = hidden.relu_().mul_(2.0)
        output: Tensor = self.down(hidden)
        return output


class Shown(nn.Module):
    """What lies between `up` and `down` is used a second time: `how`. The two layers after them can be split."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 5)
        self.norm = nn.LayerNorm(5)
        self.wide = nn.Linear(5, 12)
        self.narrow = nn.Linear(12, 3)
        self.wide_too, self.narrow_too = nn.Linear(12, 8), nn.Linear(8, 3)
        self.kept = torch.zeros(())

    def forward(self, values: Tensor) -> Any:
        hidden = self.up(values).relu()
        output = self.narrow(self.wide(self.norm(self.down(hidden))).relu())
        match self.how:
            case "returned":
                return output, hidden
            case "summed":
                return output, {"penalty": hidden.square().mean()}
            case "in training" if self.training:
                return output, hidden.norm()
            case "in evaluation" if not self.training:
                return output, hidden.norm()
            case "counted":
                return output, (hidden > 0).float().mean()
            case "called again":
                return output + self.up(values.flip(0)).relu().mean(-1, keepdim=True)
            case "split again":
                return output + self.narrow_too(self.wide_too(hidden).relu())
            case "kept":
                self.kept = hidden.abs().mean()
        return output


class OfAll(Learnable):
    """The mean of all that comes out, and what the model keeps."""

    def __init__(self, model: Shown, plan: dict[str, str] | None = None) -> None:
        super().__init__(plan)
        self.model = model

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return torch.stack([each.mean() for each in tensors_of(outputs)]).sum() + self.model.kept


def _found(model: nn.Module, example: Tensor, size: int = 2) -> TensorPlan:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = find_tensor_plan(model, Learnable(), size, example)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training
    return plan


def test_what_is_found() -> None:
    plan = _found(mlp(), torch.randn(4, 6))
    assert (plan.styles, plan.dropouts) == ({"0": "column", "3": "row"}, {"2": 1})
    plan = _found(Mixing(), torch.randn(4, 6))
    assert plan.styles == {"down": "column", "head": "row"}
    assert "mixes" in plan.unsplit["up"]
    plan = _found(Attention(), torch.randn(4, 5, 6))
    assert plan.styles == {"queries": "column", "keys": "column", "out": "row"}
    assert plan.changes == {("", "num_heads"): 2}
    plan = _found(Peeking(), torch.randn(4, 5))
    assert plan.styles == {"mlp.0": "column", "mlp.3": "row"}
    assert "outside its layer's call" in plan.unsplit["embedding"]


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("parameter of another", "what lies between them is used elsewhere"),
        ("activation", "what lies between them is used elsewhere"),
        ("recomputed", "cannot be seen: it is recomputed reentrantly"),
        ("functional dropout", "random numbers are drawn between up and down"),
        ("noise", "random numbers are drawn between up and down"),
        ("dropout of one's own", "random numbers are drawn between up and down"),
    ],
)
def test_what_would_be_that_of_one_part_only_keeps_layers_whole(which: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _found(Between(which), torch.randn(4, 3, 6))
    with pytest.raises(PlanError, match=message):
        find_tensor_plan(Between(which), Learnable({"up": "column", "down": "row"}), 2, torch.randn(4, 3, 6))


@pytest.mark.parametrize("which", ["parameter", "parameter in training"])
def test_a_parameter_between_layers_gets_the_gradients_of_all_parts(which: str) -> None:
    plan = _found(Between(which), torch.randn(4, 3, 6))
    assert (plan.styles, plan.summed) == ({"up": "column", "down": "row"}, {"scale"})


@pytest.mark.parametrize("which", ["constant", "drawn before", "in place", "nothing"])
def test_what_needs_no_gradient_may_stand_between(which: str) -> None:
    plan = _found(Between(which), torch.randn(4, 3, 6))
    assert plan.styles == {"up": "column", "down": "row"}
    assert plan.modified_in_place == ({"up"} if which == "in place" else set())


def test_layers_that_are_called_without_gradients_are_split_only_if_they_are_frozen() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.head = mlp(), nn.Linear(4, 1)

        def forward(self, values: Tensor) -> Tensor:
            with torch.no_grad():
                hidden = self.tower(values)
            output: Tensor = self.head(hidden)
            return output

    model = Tower()
    with pytest.raises(PlanError, match="called without gradients"):
        _found(model, torch.randn(4, 6))
    model.tower.requires_grad_(False)
    assert _found(model, torch.randn(4, 6)).styles == {"tower.0": "column", "tower.3": "row"}


def test_looking_for_a_plan_leaves_a_model_as_it_was() -> None:
    class Counting(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*mlp())
            self.register_buffer("mean", torch.zeros(()))
            self.register_buffer("number", torch.zeros(()))
            self.last = torch.zeros(())

        def forward(self, values: Tensor) -> Tensor:
            hidden = self[0](values)
            self.number += 1
            self.mean = 0.9 * self.mean + hidden.detach().mean()
            self.last = self.largest = hidden.detach().amax()
            output: Tensor = self[3](hidden)
            return output

    model = Counting()
    held = model.mean, model.last
    assert find_tensor_plan(model, Learnable(), 2, torch.randn(4, 6)).styles == {"0": "column", "3": "row"}
    assert (model.mean, model.last) == held
    assert not any(each.any() for each in (*held, model.number))
    assert not hasattr(model, "largest")


def test_weights_that_are_zero_at_first_prove_nothing() -> None:
    mixing = Mixing()
    nn.init.zeros_(mixing.down.weight)
    assert "mixes" in _found(mixing, torch.randn(4, 6)).unsplit["up"]
    for zeros in (["out"], ["queries"], ["keys"], ["queries", "keys", "out"]):
        attention = AnyWidth()
        for name in zeros:
            nn.init.zeros_(attention.get_submodule(name).weight)
            nn.init.zeros_(attention.get_submodule(name).bias)
        plan = _found(attention, torch.randn(4, 5, 6))
        assert plan.styles == {"queries": "column", "keys": "column", "out": "row"}
        assert plan.changes == {("", "num_heads"): 2}


def test_layers_that_are_called_twice_are_tried_twice() -> None:
    with pytest.raises(PlanError, match="between up and down mixes the parts"):
        _found(Twice(), torch.randn(4, 6))


@pytest.mark.parametrize(
    "how", ["returned", "summed", "in training", "in evaluation", "counted", "called again", "split again", "kept"]
)
def test_what_is_used_outside_its_pair_is_not_split(how: str) -> None:
    example = torch.randn(4, 6)
    model = Shown(how)
    plan = find_tensor_plan(model, OfAll(model), 2, example)
    assert {"up", "down"} & plan.styles.keys() == set()
    assert "used elsewhere" in plan.unsplit["up"]
    others = {"wide": "column", "narrow": "row"}
    assert others.items() <= plan.styles.items()
    with pytest.raises(PlanError, match=r"\['up', 'down'\]: what lies between them is used elsewhere"):
        find_tensor_plan(model, OfAll(model, {"up": "column", "down": "row", **others}), 2, example)
    assert find_tensor_plan(model, OfAll(model, others), 2, example).styles == others


def test_a_hook_of_the_users_sees_no_part() -> None:
    model, seen = Shown("hooked"), list[Tensor]()
    assert find_tensor_plan(model, OfAll(model), 2, torch.randn(4, 6)).styles["up"] == "column"
    model.up.register_forward_hook(lambda module, args, output: seen.append(output))
    learnable = OfAll(model)
    learnable.loss = lambda outputs, batch: outputs.mean() + seen[-1].abs().mean()  # type: ignore[method-assign]
    assert "up" not in find_tensor_plan(model, learnable, 2, torch.randn(4, 6)).styles


def test_heads_that_ranks_cannot_share() -> None:
    with pytest.raises(PlanError, match="no layer can be split"):
        _found(Attention(2), torch.randn(4, 5, 6), size=3)
