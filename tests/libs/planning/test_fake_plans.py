"""Models that this process does not hold: where they are recognised, what is counted of them, which rank has what."""

import functools
import logging
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.data import TensorDataset

from shoal.cost import CostTable, fake_tensors
from shoal.cost.cost_table import format_ranks
from shoal.cost.fake_tensors import ModelTooLarge, build_small_model, use_fake_tensors
from shoal.data import Data
from shoal.errors import PlanError
from shoal.libs.planning.predict import fake_step
from shoal.libs.planning.predict.fake_plan import NOTE, open_task
from shoal.libs.planning.predict.fake_step import FakeTask, find_repeated_blocks
from shoal.libs.planning.predict.placement import build_placement
from shoal.libs.planning.predict.predict import predict_cost
from shoal.libs.planning.predict.rank_step import RankStep
from shoal.models.decoder import Decoder
from shoal.parallel.spec import ParallelDims, ParallelSpec
from shoal.parallel.tensor.plan import TensorPlan
from shoal.train import Task, TrainSpec
from shoal.train.launch.validate import _check_model

TOKENS = 64
CONTEXT = 16
WIDTH = 32
DEPTH = 8
BLOCK = 12 * WIDTH * WIDTH + 13 * WIDTH


class Text(Task):
    """A decoder of many layers."""

    depth = DEPTH

    def model(self) -> nn.Module:
        return Decoder(TOKENS, CONTEXT, WIDTH, self.depth, heads=4)

    def data(self) -> Data:
        tokens = torch.zeros(64, CONTEXT, dtype=torch.int64)
        return Data(TensorDataset(tokens, tokens))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    def postprocess(self, outputs: Any) -> Any:
        return {"best": outputs["output"].argmax(-1)}


class Routed(Text):
    """A model whose shapes depend on values."""

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), Nonzero())


class Locked(Text):
    def model(self) -> nn.Module:
        model = super().model()
        model.lock = threading.Lock()
        return model


class Nonzero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.flatten()[x.flatten() > 0].mean()


@pytest.fixture
def _small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensors, "MAX_REAL_BYTES", 1000)


@pytest.fixture
def _shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter models, of which FSDP has not all of its buffers at once: arithmetic and states are the same."""
    monkeypatch.setattr(fake_step, "NUM_BLOCKS", (1, 2))


def spec_of(*words: str) -> TrainSpec:
    return TrainSpec(batch_size=16).override(["device=cpu", *words])


def count(*words: str) -> CostTable:
    return predict_cost(Text(), spec_of(*words))


@functools.cache
def count_sharded() -> CostTable:
    """Of the plan that several tests look at, on fake tensors."""
    return count("parallel=fsdp", "workers=4")


def open_text(*words: str, task: Text | None = None) -> FakeTask:
    task = task or Text()
    return open_task(task, spec_of(*words))


def read(*words: str, num_blocks: int | None = None, samples: int = 4, task: Text | None = None) -> RankStep:
    spec, fake = spec_of(*words), open_text(task=task)
    if num_blocks is None:
        return fake.read_step(spec.parallel, spec.resolve_dims(), samples)
    return fake.run_step(spec.parallel, spec.resolve_dims(), samples, num_blocks)


# -- what is large


def test_a_model_beyond_the_limit_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[nn.Module] = []

    def build() -> nn.Module:
        try:
            for _ in range(4):
                built.append(nn.Linear(8, 8))
        except Exception:  # noqa: BLE001 - a model's own code must not stop the limit
            pytest.fail("the model's code has seen it")
        return nn.Sequential(*built)

    assert build_small_model(build) is not None
    built.clear()
    monkeypatch.setattr(fake_tensors, "MAX_REAL_BYTES", 2 * 4 * 72)
    with pytest.raises(ModelTooLarge):
        build_small_model(build)
    assert len(built) == 2


def test_a_tied_parameter_counts_once_towards_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensors, "MAX_REAL_BYTES", 4 * 64)
    one, other = nn.Linear(8, 8, bias=False), nn.Module()

    def build() -> nn.Module:
        other.weight = one.weight
        other.again = one.weight
        return other

    assert build_small_model(build) is other


def test_conversions_of_a_fake_model_keep_tied_parameters() -> None:
    with use_fake_tensors():
        model = Decoder(TOKENS, CONTEXT, WIDTH, 2, heads=4, tied=True).to("cpu").to(torch.bfloat16)
        table, head = model.embedding.token.weight, model.head.output.weight
        assert table is head
        assert isinstance(table, FakeTensor)
        assert table.dtype is torch.bfloat16
    real = nn.Linear(2, 2).to(torch.bfloat16)  # and nothing of it stays
    assert real.weight.dtype is torch.bfloat16


# -- what is counted


def test_equal_blocks_are_found_beside_others() -> None:
    blocks = find_repeated_blocks(Text().model())
    assert (blocks.path, blocks.names) == ("", tuple(f"block{number}" for number in range(1, DEPTH + 1)))
    assert find_repeated_blocks(nn.Sequential(*[nn.Linear(2, 2) for _ in range(7)])) is None
    shared = nn.Linear(2, 2)
    assert find_repeated_blocks(nn.Sequential(*[shared] * 12)) is None


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("parallel=single",), marks=pytest.mark.soak),
        pytest.param(("parallel=ddp", "workers=4"), marks=pytest.mark.soak),
        pytest.param(("parallel=fsdp", "parallel.tensor=2", "workers=4"), marks=pytest.mark.soak),
        ("parallel=fsdp", "workers=4", "parallel.precision=bf16", "clip_norm=1.0"),
    ],
    ids=" ".join,
)
def test_two_short_models_tell_what_a_deep_one_takes(words: tuple[str, ...]) -> None:
    deep, told = read(*words, num_blocks=DEPTH), read(*words)
    for name, value in deep.values.items():
        assert told.values[name] == pytest.approx(value, rel=0.01, abs=4096), name
    assert told.peaks == pytest.approx(deep.peaks, rel=0.02)


@pytest.mark.usefixtures("_small_limit")
def test_a_model_that_cannot_be_copied_is_built_again() -> None:
    words = ("parallel=fsdp", "workers=2")
    assert read(*words, task=Locked(), num_blocks=1).values == read(*words, num_blocks=1).values


@pytest.mark.usefixtures("_small_limit")
def test_a_sharded_plan_by_hand() -> None:
    found = count_sharded()
    total = DEPTH * BLOCK + TOKENS * WIDTH * 2 + CONTEXT * WIDTH + 2 * WIDTH
    assert found["parameters"] == total
    assert found["parameters_rank"] == pytest.approx(total / 4, rel=0.02)
    assert found["memory_optimizer"] == pytest.approx(2 * found["memory_parameters"], rel=0.02)
    assert found["memory_gradients"] == found["memory_parameters"]
    assert found["memory_peak"] > 4 * found["memory_parameters"]
    assert NOTE in found.notes
    assert "latency_s" not in found.values
    assert found["step_s"] > 0
    assert [row.share for row in found.placement_rows] == [1 / 4]


@pytest.mark.usefixtures("_small_limit")
def test_counts_are_those_of_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "parallel=fsdp", "workers=4"
    counted = count_sharded()
    monkeypatch.setattr(fake_tensors, "MAX_REAL_BYTES", 1 << 30)
    monkeypatch.setattr("shoal.libs.planning.predict.predict.BUDGET_S", 1e6)
    run = count(*words)
    assert NOTE not in run.notes
    for name in ("parameters", "parameters_rank", "flops_step", "flops_forward_sample", "flops_backward_sample"):
        assert counted[name] == pytest.approx(run[name], rel=1e-6), name
    for name in ("memory_parameters", "memory_gradients", "memory_optimizer", "memory_activations", "sent_bytes"):
        assert counted[name] == pytest.approx(run[name], rel=0.02), name
    assert counted["memory_peak"] == pytest.approx(run["memory_peak"], rel=0.1)


@pytest.mark.usefixtures("_small_limit", "_shallow")
def test_a_stage_holds_its_part_and_the_activations_in_flight() -> None:
    staged, whole = count("parallel=pipeline", "workers=4", "parallel.micro_batches=4"), read(samples=16)
    assert staged["parameters_rank"] == pytest.approx(staged["parameters"] / 4, rel=0.2)
    assert staged["memory_peak"] < whole.memory_peak / 2
    assert 0 < staged["bubble"] < 1
    assert staged["flops_step"] == pytest.approx(whole.values["flops_rank"], rel=0.01)
    with pytest.raises(PlanError, match="blocks"):
        count("parallel=pipeline", "workers=16", "parallel.micro_batches=16")
    with pytest.raises(PlanError, match="two stages"):
        count("parallel=pipeline", "workers=2", "parallel.schedule=zbv")


def test_gpus_copy_nothing_to_exchange() -> None:
    spec = spec_of("parallel=fsdp", "workers=4", "parallel.backend=gloo")
    fakes = open_text(), open_text("device=cuda")
    cpu, gpu = (each.run_step(spec.parallel, spec.resolve_dims(), 4, 1) for each in fakes)
    assert gpu.values["sent_bytes"] == pytest.approx(cpu.values["sent_bytes"] * 3 / 4, rel=0.05)  # Gloo reduces all
    assert gpu.memory_peak < cpu.memory_peak


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
@pytest.mark.usefixtures("_small_limit", "_shallow")
def test_the_time_on_gpus_that_are_not_here_is_not_predicted() -> None:
    found = count("device=cuda")
    assert not math.isfinite(found["step_s"])
    assert any("times are not predicted" in note for note in found.notes)


@pytest.mark.usefixtures("_small_limit")
def test_weights_that_are_gathered_in_bf16_are_counted() -> None:
    plan = ("parallel=fsdp", "workers=4")
    gathered, cast = (read(*plan, f"parallel.precision={each}", num_blocks=1) for each in ("bf16_params", "bf16"))
    assert gathered.memory_peak < cast.memory_peak
    assert gathered.values["flops_forward"] == cast.values["flops_forward"]
    with pytest.raises(PlanError, match=r"bf16_params.*single gathers none"):
        count("parallel.precision=bf16_params")


@pytest.mark.usefixtures("_small_limit")
def test_a_model_that_fake_tensors_cannot_run_is_run_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Text, "depth", 1)
    found = predict_cost(Routed(), spec_of())
    assert any("could not be counted on fake tensors" in note for note in found.notes)
    assert found["latency_s"] > 0


# -- beside torch's own tracker


def test_memory_of_one_process_is_that_of_torchs_tracker() -> None:
    task, tracker = Text(), MemTracker()
    with FakeTensorMode():
        model = task.model()
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        batch = (torch.zeros(16, CONTEXT, dtype=torch.int64),) * 2
        tracker.track_external(model, optimizer, *batch)
        with tracker:
            for step in range(2):
                task.loss(model(batch[0]), batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
    [(_, peak)] = tracker.get_tracker_snapshot("peak").items()
    found = open_text().read_step(ParallelSpec(), ParallelDims(), 16)
    assert found.memory_peak == pytest.approx(peak["Total"], rel=0.1)


# -- the check of a run


@pytest.mark.usefixtures("_small_limit")
def test_the_check_of_a_large_run_builds_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[type] = []
    forward = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda self, x: kinds.append(type(x)) or forward(self, x))
    batch = tuple(torch.zeros(2, 2, CONTEXT).long())
    facts = _check_model(spec_of("parallel=fsdp", "workers=2"), Text(), batch, batch)
    assert set(kinds) == {FakeTensor}
    assert facts.num_parameters > DEPTH * BLOCK
    assert facts.metric_names == ["loss"]
    [output] = facts.signature.outputs
    assert (output.name, output.datatype, output.shape) == ("best", "INT64", [-1, CONTEXT])


@pytest.mark.usefixtures("_small_limit")
def test_the_check_builds_a_network_that_fake_tensors_cannot_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Text, "depth", 1)
    monkeypatch.setattr(Text, "postprocess", None)
    with caplog.at_level(logging.WARNING):
        facts = _check_model(spec_of(), Routed(), (batch := tuple(torch.zeros(2, 2, CONTEXT).long())), batch)
    assert "on fake tensors" in caplog.text
    assert facts.signature.outputs[0].shape == [-1, CONTEXT, TOKENS]


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
