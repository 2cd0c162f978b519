"""What plans are made of, in one process: masks, loss scales, clipping, states, blocks, evaluation, compiling."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.data import Loader
from shoal.errors import PlanError, SpecMismatch
from shoal.parallel import ParallelSpec, World
from shoal.parallel.layers.compile import compile_forward
from shoal.parallel.layers.dropout import DropoutRng, SeededDropout, TensorPart, mix_seed, seed_dropout
from shoal.parallel.layers.precision import LossScale
from shoal.parallel.spmd.base import SingleProcessModel, SpmdModel
from shoal.parallel.spmd.fsdp_layout import find_blocks
from shoal.parallel.state import gradients
from shoal.parallel.state import state_dict as state
from shoal.parallel.state.module_snapshot import preserve_module
from shoal.random_state import preserve_rng
from shoal.train.loop.evaluation import evaluate
from train_task import CLASSES, FEATURES, Points, Toy

CPU = torch.device("cpu")


class Mean:
    """A learnable whose loss is the mean of what comes out, times a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch,)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.float().mean() * self.factor

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"largest": outputs.max(), "of one element": outputs.max().reshape(1)}

    def tensor_plan(self) -> dict[str, str] | None:
        return None

    def pipeline_cuts(self) -> list[str] | None:
        return None


def _single(model: nn.Module, learnable: Mean | None = None, **plan: Any) -> SingleProcessModel:
    return SingleProcessModel(model, learnable or Mean(), ParallelSpec(**plan), World.single("cpu"), 5)


def _dropped(
    values: Tensor, rank: int, size: int, step: int = 0, part: TensorPart | None = None, **layer: Any
) -> Tensor:
    """What a dropout layer of rank `rank` of `size` makes of its rows of `values`, in two calls."""
    model = nn.Sequential(layer.get("layer", nn.Dropout(0.4)))
    draws = DropoutRng(7, rank, size, CPU)
    seed_dropout(model, draws)
    assert isinstance(model[0], SeededDropout)
    model[0].part = part
    draws.begin_micro_step(step, 0, values.shape[layer.get("dim", 0)])
    return torch.stack([model(values), model(values)])


def test_ranks_take_their_rows_of_one_mask() -> None:
    ones = torch.ones(8, 5, 3)
    whole = _dropped(ones, 0, 1)
    assert 0.2 < (whole == 0).float().mean() < 0.6
    assert whole.max().item() == pytest.approx(1 / 0.6)
    assert not torch.equal(whole[0], whole[1])  # another call, another mask
    assert not torch.equal(whole, _dropped(ones, 0, 1, step=1))
    assert torch.equal(whole, _dropped(ones, 0, 1))
    parts = [_dropped(ones[:2], rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat(parts, 1), whole)
    by_channel = _dropped(ones, 0, 1, layer=nn.Dropout1d(0.5))
    assert ((by_channel == 0).all(-1) | (by_channel != 0).all(-1)).all()
    assert torch.equal(
        torch.cat([_dropped(ones[:4], rank, 2, layer=nn.Dropout1d(0.5)) for rank in (0, 1)], 1), by_channel
    )


def test_masks_where_the_sample_is_not_the_first_dimension_and_where_features_are_split() -> None:
    ones = torch.ones(3, 8, 6)  # [T, B, F]
    whole = _dropped(ones, 0, 1, dim=1)
    assert torch.equal(torch.cat([_dropped(ones[:, :4], rank, 2, dim=1) for rank in (0, 1)], 2), whole)
    rows = torch.ones(24, 6)  # three rows for each of 8 samples
    model = [nn.Dropout(0.4) for _ in range(3)]
    for index, (rank, size) in enumerate([(0, 1), (0, 2), (1, 2)]):
        draws = DropoutRng(7, rank, size, CPU)
        seed_dropout(model[index], draws)
        draws.begin_micro_step(0, 0, 8 // size)
    assert torch.equal(torch.cat([model[1](rows[:12]), model[2](rows[:12])]), model[0](rows))
    ones = torch.ones(8, 6)
    whole = _dropped(ones, 0, 1)
    parts = [_dropped(ones[:, :2], 0, 1, part=TensorPart(1, which, 3)) for which in range(3)]
    assert torch.equal(torch.cat(parts, -1), whole)


def test_recomputing_activations_draws_the_same_masks() -> None:
    def gradient(recompute: bool) -> Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
        draws = DropoutRng(7, 0, 1, CPU)
        seed_dropout(model, draws)
        draws.begin_micro_step(0, 0, 4)
        values = torch.ones(4, 6)
        for _ in range(3):  # one layer, called again and again
            values = checkpoint(model, values, use_reentrant=False) if recompute else model(values)
        values.sum().backward()
        grad = model[0].weight.grad
        assert grad is not None
        return grad

    assert torch.equal(gradient(True), gradient(False))


def test_dropout_at_its_ends_and_copied() -> None:
    ones = torch.ones(4, 2)
    assert torch.equal(_dropped(ones, 0, 1, layer=nn.Dropout(0.0))[0], ones)
    assert not _dropped(ones, 0, 1, layer=nn.Dropout(1.0)).any()
    parallel = _single(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    copied = copy.deepcopy(parallel.module)
    assert copied[1].rng is parallel.module[1].rng  # type: ignore[index, union-attr]
    assert len({mix_seed(1, 2), mix_seed(2, 1), mix_seed(1, 2, 0), mix_seed(0, 1, 2)}) == 4


def test_a_loss_scale_shrinks_on_overflow_and_grows_after_good_steps() -> None:
    scale = LossScale(initial=4.0, growth_steps=2)
    assert not scale.update(False)
    assert scale.value == 2.0
    assert scale.update(True)
    assert scale.update(True)
    assert scale.value == 4.0
    scale.value = LossScale.MIN_VALUE
    assert scale.update(False)  # nothing more can be done: the Trainer says what it is


class Caching(nn.Module):
    """Its forward pass makes one buffer, lets another grow and replaces a third."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.width = nn.Linear(1, 1, bias=False), 1
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("cache", torch.ones(1), persistent=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(1)
        if len(values) > self.width:
            self.width, self.cache = len(values), torch.ones(len(values))
        self.calls = self.calls + 1
        return self.layer(values) * self.mask * self.cache[: len(values), None]


def test_a_repeated_step_takes_back_buffers_that_are_made_replaced_or_grow() -> None:
    model = Caching()
    parallel = _single(model, Mean(8.0), precision="fp16")
    parallel.train_step(torch.ones(4, 1), 0)
    assert parallel._loss_scale.value < 65536
    assert model.calls == 1
    assert (model.width, model.cache.shape) == (4, (4,))
    assert model.layer.weight.grad.item() == 8.0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_trial_leaves_modules_gradients_and_random_states_as_they_were() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model = nn.Sequential(scripted, nn.BatchNorm1d(2), nn.Linear(2, 1))
    kept = torch.ones_like(model[2].weight)
    model[2].weight.grad = kept
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with preserve_module(model), preserve_rng(seed=3):
        assert all(parameter.grad is None for parameter in model.parameters())
        model(torch.randn(4, 2)).sum().backward()
        assert any(not torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
        first = draw()
    with preserve_rng(seed=3):
        torch.randn(4, 2)
        assert draw() == first
    assert model[2].weight.grad is kept
    assert model[0][0].weight.grad is None
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])  # type: ignore[index]


def test_the_scale_of_a_loss_goes_on_where_it_was() -> None:
    parallel, again = (_single(nn.Linear(1, 1, bias=False), Mean(8.0), precision="fp16") for _ in range(2))
    parallel.train_step(torch.ones(4, 1), 0)
    again.load_loss_scale_state(parallel.loss_scale_state())
    assert again.loss_scale_state() == parallel.loss_scale_state()
    assert again.loss_scale_state()["value"] < 65536
    whole = _single(nn.Linear(1, 1, bias=False), Mean(8.0))
    assert whole.loss_scale_state() == {}
    whole.load_loss_scale_state(parallel.loss_scale_state())  # a precision that needs none
    again.load_loss_scale_state({})  # of a run that had none
    assert again.loss_scale_state()["good_steps"] == 1


def test_clipping_is_that_of_torch() -> None:
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        (model(torch.ones(4, 3)).square().sum() * 9).backward()
    models[0].bias.grad = models[1].bias.grad = None
    expected = nn.utils.clip_grad_norm_(models[0].parameters(), 1.5)
    torch.testing.assert_close(gradients.clip(models[1].parameters(), 1.5, CPU), expected)
    torch.testing.assert_close(models[1].weight.grad, models[0].weight.grad)
    assert gradients.clip([nn.Parameter(torch.ones(2))], 1.0, CPU).item() == 0.0


class Counting(torch.optim.SGD):
    """It counts its steps among its settings, from the first one on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
        super().step(closure)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"fused": True, "amsgrad": True}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
        (Counting, {"momentum": 0.9}),
    ],
    ids=str,
)
def test_asking_for_an_optimisers_state_changes_nothing(make: Any, options: dict[str, Any]) -> None:
    def run(asked: bool) -> tuple[dict[str, Any], list[float]]:
        torch.manual_seed(0)
        parallel = _single(nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})["used"])
        optimizer = make(parallel.module.parameters(), lr=0.1, **options)
        rates: list[float] = []
        optimizer.register_step_post_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
        shapes: list[list[torch.Size]] = []
        for step in range(3):
            if asked:
                found = parallel.optimizer_state(optimizer)["weight"]
                shapes.append([found["settings"].shape, *(each.shape for each in found["state"].values())])
            parallel.train_step(torch.ones(2, 2), step)
            optimizer.step()
        assert len({str(each) for each in shapes}) <= 1  # what is planned at first holds later, too
        found = parallel.optimizer_state(optimizer)["weight"]
        return {**parallel.model_state(), **found["state"]}, [*found["settings"].tolist(), *rates]

    (plain, numbers), (asked, numbers_asked) = run(False), run(True)
    assert numbers == numbers_asked  # no step more was seen
    for name, value in plain.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(asked[name])), name


def test_an_optimisers_state_goes_over_with_its_settings() -> None:
    first, second = _single(nn.Linear(2, 2)), _single(nn.Linear(2, 2))
    saved, loaded = (torch.optim.AdamW(each.module.parameters(), lr=0.5, betas=(0.8, 0.9)) for each in (first, second))
    first.train_step(torch.ones(2, 2), 0)
    saved.step()
    saved.param_groups[0]["lr"] = 0.25
    saved.param_groups[0]["initial_lr"] = 0.5  # a schedule's
    loaded.param_groups[0]["betas"] = (0.1, 0.2)
    values = first.optimizer_state(saved)
    second.load_optimizer_state(loaded, values)
    assert loaded.param_groups[0]["lr"] == 0.25
    assert loaded.param_groups[0]["betas"] == (0.8, 0.9)
    mine = second.optimizer_state(loaded)
    assert torch.equal(mine["weight"]["state"]["exp_avg"], values["weight"]["state"]["exp_avg"])
    assert mine["bias"]["state"]["step"].item() == 1
    with pytest.raises(SpecMismatch, match="bias"):
        second.load_optimizer_state(loaded, {"weight": values["weight"]})
    with pytest.raises(SpecMismatch, match="has no momentum_buffer, which SGD keeps"):
        second.load_optimizer_state(torch.optim.SGD(second.module.parameters(), 0.1, momentum=0.9), values)


def test_weights_that_do_not_fit_are_named() -> None:
    parallel = _single(nn.Linear(2, 3))
    good = nn.Linear(2, 3).state_dict()
    parallel.load_model_state(dict(good))
    assert torch.equal(parallel.full_weights()["weight"], good["weight"])
    for wrong, message in (
        ({"weight": good["weight"]}, "model.bias.*is missing"),
        ({**good, "more": torch.zeros(1)}, "model.more.*not in the model"),
        ({**good, "bias": torch.zeros(4)}, r"model.bias = \[4\]: the model has \[3\]"),
    ):
        with pytest.raises(SpecMismatch, match=message):
            state.load_model_state(parallel.module, wrong)


def test_blocks_are_layers_of_lists_that_share_nothing_with_others() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.body = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), nn.ReLU())
            self.layers = nn.ModuleList(nn.ModuleDict({"mlp": nn.Linear(4, 4)}) for _ in range(2))
            self.layers.append(nn.Linear(4, 9, bias=False))
            self.layers[2].weight = self.embedding.weight  # type: ignore[assignment]

    assert [name for name, _ in find_blocks(Model())] == ["body.0.0", "body.0.1", "body.0.2", "layers.0", "layers.1"]
    assert list(find_blocks(nn.Linear(3, 3))) == []


def test_evaluation_counts_samples_and_leaves_modes_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.9), nn.BatchNorm1d(1))
    model[2].eval()  # frozen
    parallel = _single(model)
    batch = torch.randn(4, 2)
    sums = parallel.evaluate(batch, 4)
    model.eval()
    torch.testing.assert_close(sums["loss"], torch.stack([model(batch).mean() * 4, torch.tensor(4)]).double())
    torch.testing.assert_close(sums["largest"], torch.stack([model(batch).max() * 4, torch.tensor(4)]).double())
    torch.testing.assert_close(sums["of one element"], sums["largest"])
    model.train()
    model[2].eval()
    assert not any(each.any() for each in parallel.evaluate(batch, 0).values())
    assert [module.training for module in model] == [True, True, False]
    assert parallel.communication_s == 0.0
    assert parallel.sum_over_data_ranks(torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_parameter_that_is_thawed_in_mid_run_is_refused() -> None:
    """It would keep the gradients of all steps, and be averaged over no ranks."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    parallel = _single(model)
    parallel.train_step(torch.randn(4, 2), 0)
    model[0].weight.requires_grad_(True)
    with pytest.raises(PlanError, match=r"'0.weight': was frozen when the run began"):
        parallel.train_step(torch.randn(4, 2), 1)


def test_what_cannot_be_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    compile_with = torch.compile
    for backend, message in ((refuses, "no compiler here"), ("eager", "")):
        monkeypatch.setattr(torch, "compile", lambda function, backend=backend: compile_with(function, backend=backend))
        parallel = _single(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), compile=True)
        if not message:
            parallel.train_step(torch.ones(4, 2), 0)
            continue
        with pytest.raises(PlanError, match=f"(?s)Sequential cannot be compiled .*{message}"):
            parallel.train_step(torch.ones(4, 2), 0)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    with pytest.raises(PlanError, match="no graph was made of it"):
        _single(nn.Linear(2, 2), compile=True).train_step(torch.ones(4, 2), 0)


@pytest.mark.parametrize(("widths", "num_graphs"), [(list(range(2, 16)), 14), ([4] * 14, 1)])
def test_each_block_is_compiled_and_alike_ones_once(
    widths: list[int], num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_with(function, backend=counted))
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for width in widths]
    for width, block in zip(widths, blocks, strict=True):
        compile_forward(block)
        block(torch.ones(2, width)).sum().backward()
    assert len(graphs) == num_graphs
    for width, block in zip(widths, blocks, strict=True):
        expected = block[1](block[0](torch.ones(2, width)))
        torch.testing.assert_close(block(torch.ones(2, width)), expected)
    assert len(graphs) == num_graphs


def test_a_repeated_step_counts_once_in_batch_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    parallel = _single(model, Mean(8.0), precision="fp16")
    parallel.train_step(torch.randn(4, 1), 0)
    assert parallel._loss_scale.value < 65536
    assert model[1].num_batches_tracked == 1


def test_a_second_model_that_is_alike_is_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_with(function, backend="eager"))
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        losses.append(_single(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), compile=True).train_step(torch.ones(4, 3), 0))
    torch.testing.assert_close(losses[0], losses[1])


# -- what lies on the model's device: `meta`, whose tensors refuse those of others as CUDA's do


META = World(0, 1, torch.device("meta"))


class Elsewhere(SpmdModel):
    """A model of a device that computes nothing: what it adds up is made up, the means are 1."""

    def __init__(self) -> None:
        model = nn.Linear(FEATURES, CLASSES, device=META.device)
        super().__init__(model, Toy(), ParallelSpec(), World.single("cpu"), 0)  # where masks are drawn: not on meta
        self._world = META

    def sum_over_data_ranks(self, values: Tensor) -> Tensor:
        assert super().sum_over_data_ranks(values).device == META.device
        return torch.ones(values.shape)


def test_an_evaluation_adds_up_where_the_model_is() -> None:
    loader = Loader(Points(50, 2), batch_size=32, device=META.device, shuffle=False, drop_last=False)
    assert evaluate(Elsewhere(), loader) == {"loss": 1.0, "accuracy": 1.0}


def test_the_norm_of_no_gradients_is_where_the_model_is() -> None:
    model = Elsewhere()
    without = model.clip_gradients(1.0)
    model.module(torch.zeros(2, FEATURES, device=META.device)).sum().backward()
    assert without.device == model.clip_gradients(1.0).device == META.device
