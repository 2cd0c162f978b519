"""Plans that do not fit are refused before anything starts, naming what, its size and a remedy."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnable import Learnable, mlp
from programs import run_ranks
from shoal.errors import PlanError
from shoal.parallel import ParallelSpec, World, check_plan
from shoal.parallel.build import parallelize
from shoal.parallel.model import split_micro_batches


class NormAndActivation(nn.BatchNorm1d):
    """As timm's: an activation behind a batch normalisation, in one class."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


def _check(model: nn.Module, plan: dict[str, Any] | str, workers: int, device: str = "cpu", **given: Any) -> None:
    spec = ParallelSpec.model_validate(plan)
    check_plan(model, Learnable(given.get("styles")), spec, spec.resolve_dims(workers), torch.randn(4, 6), device)


@pytest.mark.parametrize(
    ("model", "plan", "workers", "message"),
    [
        (mlp(), {"precision": "fp16"}, 1, "is for CUDA, not for cpu. use bf16"),
        (nn.LazyLinear(3), {}, 1, "shape is not known yet"),
        (nn.ReLU(), {}, 1, "has no parameter to train"),
        (mlp(10), {"data": 1, "tensor": 4, "pipeline": 2}, 8, r"0: has 10 outputs, which 4 ranks cannot share"),
        (mlp(), {"data": 2, "shard": True, "pipeline": 2, "schedule": "zbv"}, 4, "splits the backward pass"),
        (nn.Sequential(mlp(), nn.Linear(4, 1).double()), "fsdp", 2, "use one dtype, or ddp"),
        (mlp(10), "tensor", 4, r"0: has 10 outputs, which 4 ranks cannot share"),
        (nn.LSTM(6, 8), "tensor", 2, "recurrent layers are not split"),
        (nn.Linear(6, 3), "tensor", 2, "no layer can be split"),
        (
            nn.Sequential(nn.Linear(6, 4), NormAndActivation(4)),
            "ddp",
            2,
            "'1': is a NormAndActivation, .* use one data",
        ),
        (nn.BatchNorm1d(6, track_running_stats=False), "fsdp", 2, "has no running statistics: .* nn.GroupNorm"),
        (nn.Embedding(6, 4, sparse=True), "fsdp", 2, "has sparse gradients, which cannot be sharded"),
        (nn.Embedding(6, 4, max_norm=1.0), "ddp", 2, "has a max_norm: .* or use one data rank"),
        (nn.EmbeddingBag(6, 4, max_norm=1.0), "fsdp", 2, "has a max_norm: .* or use one data rank"),
        (nn.Embedding(6, 4, scale_grad_by_freq=True), "ddp", 2, "has scale_grad_by_freq: .* or use one data rank"),
        (mlp(), {"precision": "bf16_params"}, 2, "gathers sharded weights in bf16, and data 2 .* use precision=bf16"),
        (
            nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)),
            {"shard": True, "precision": "bf16_params"},
            2,
            "running statistics, which 1 has in fp32. use precision=bf16",
        ),
        (mlp().double(), {"shard": True, "precision": "bf16_params"}, 2, "0.weight is torch.float64. use precision="),
        (mlp(), {"offload": "all", "shard": True}, 2, "where a run on the CPU has them. use none"),
        (mlp(), {"reshard_after_forward": False}, 2, "gathers none. leave it at auto"),
        (nn.Linear(6, 4), {"activation_checkpointing": "block"}, 1, "no layer of a list .* in Linear. put the layers"),
        (mlp(), {"data": 1, "pipeline": 2, "activation_checkpointing": "block"}, 2, "a pipeline's stage may begin"),
        (
            nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)),
            {"compile": True, "activation_checkpointing": "selective"},
            1,
            "statistics of 0.1 twice in compiled layers. use compile=false",
        ),
    ],
)
def test_refusals(model: nn.Module, plan: Any, workers: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _check(model, plan, workers)


class Bounded(nn.Module):
    """Short vectors in and out: an embedding that shortens the rows it looks up, and a head of the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(6, 4, max_norm=1.0), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.layer(self.embedding(tokens)).relu())
        return output


def _refused(world: World) -> str:
    spec = ParallelSpec.model_validate("pipeline")
    with pytest.raises(PlanError) as refused:
        parallelize(Bounded(), Learnable(), spec, spec.resolve_dims(2), world, torch.arange(4))
    return str(refused.value)


def test_a_weight_that_a_stage_would_change_for_itself_is_not_shared_with_another() -> None:
    for refused in run_ranks(_refused, 2):
        assert "'embedding': has a max_norm, and pipeline ranks [0, 1] use its weight" in refused


@pytest.mark.parametrize("plan", ["fsdp", {"data": 2, "tensor": 2}])
def test_hooks_of_gradients_that_shards_would_not_call(plan: Any) -> None:
    for kind in ("register_hook", "register_post_accumulate_grad_hook"):
        model, workers = mlp(), 2 if plan == "fsdp" else 4
        getattr(model[3].bias, kind)(lambda gradient: None)
        with pytest.raises(PlanError, match=r"'3.bias': has a hook, .* use parallel=ddp"):
            _check(model, plan, workers)
        _check(model, "ddp", 2)


def test_a_layer_with_a_hook_is_not_split() -> None:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient / 2)
    with pytest.raises(PlanError, match="0 has a parameter with a hook"):
        _check(model, "tensor", 2, styles={"0": "column", "3": "row"})
    with pytest.raises(PlanError, match=r"no layer can be split .*0: has a parameter with a hook"):
        _check(model, "tensor", 2)


def test_a_parameter_without_a_dimension() -> None:
    model = mlp()
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    with pytest.raises(PlanError, match=r"'scale': is a parameter without a dimension"):
        _check(model, "fsdp", 2)
    _check(model, "ddp", 2)


@pytest.mark.parametrize(
    ("styles", "message"),
    [
        ({"0": "sideways"}, "is no style"),
        ({"nothing.*": "row"}, "matches no linear layer"),
        ({"0": "vocabulary"}, "cannot be split by vocabulary"),
        ({"0": "column"}, "no layer split by rows follows"),
        ({"3": "row"}, "no layer before it by columns"),
    ],
)
def test_a_users_tensor_plan_is_refused(styles: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _check(mlp(), "tensor", 2, styles=styles)


def test_a_users_tensor_plan_must_divide_even_without_an_example() -> None:
    spec = ParallelSpec.model_validate("tensor")
    with pytest.raises(PlanError, match="3 has 10 inputs, which 4 ranks cannot share"):
        check_plan(mlp(10), Learnable({"3": "row"}), spec, spec.resolve_dims(4))


def test_a_batch_that_cannot_be_divided() -> None:
    with pytest.raises(PlanError, match="batch_size = 5: cannot be divided into 2 micro-batches"):
        split_micro_batches(torch.zeros(5, 2), 2)
    parts = split_micro_batches({"a": (torch.arange(6), "text"), "b": torch.tensor(1)}, 3)
    assert [part["a"][0].tolist() for part in parts] == [[0, 3], [1, 4], [2, 5]]
    assert parts[2]["a"][1] == "text"
    assert parts[2]["b"] == 1


def test_a_loss_that_is_no_scalar() -> None:
    learnable = Learnable()
    learnable.loss = lambda outputs, batch: outputs  # type: ignore[method-assign]
    spec = ParallelSpec()
    parallel = parallelize(mlp(), learnable, spec, spec.resolve_dims(1), World.single("cpu"), torch.randn(4, 6))
    with pytest.raises(ValueError, match="is not a scalar"):
        parallel.train_step(torch.randn(4, 6), 0)


def test_more_workers_than_the_plan_has() -> None:
    spec = ParallelSpec()
    with pytest.raises(PlanError, match="start 2 processes"):
        parallelize(mlp(), Learnable(), spec, spec.resolve_dims(2), World.single("cpu"), torch.randn(4, 6))
