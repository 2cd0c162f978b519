"""What a pipeline does beside its sums: where it is split, what each rank keeps, what is refused, and how it ends."""

import os
from typing import Any

import pytest
import torch
from benchmarks.ours.stages import measure_idle_share
from cases import SEED, VOCABULARY, WIDTH, Decoder, Factory, build, full, global_batch, make, share, whole_gradients
from torch import Tensor, nn

from learnable import Classifier
from programs import RanksFailed, run_ranks
from shoal.errors import PlanError, SpecMismatch
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.pipeline.model import PipelineModel
from shoal.parallel.pipeline.stages import ScheduleCache, shape_key

TOLERANCE = 1e-5  # fp32: sums in another order


def cut_at(*modules: str) -> Classifier:
    learnable = Classifier()
    learnable.cuts = list(modules)
    return learnable


def build_stages(
    world: World, model: str | Factory = "decoder", learnable: Any = None, **plan: Any
) -> tuple[PipelineModel, tuple[Tensor, ...]]:
    """The pipeline, and this rank's share of the batch."""
    fields = {"pipeline": 2, "micro_batches": 4, "schedule": "1f1b", **plan}
    pipeline = build(model, ParallelSpec.parse(fields), world, learnable)
    assert isinstance(pipeline, PipelineModel)
    return pipeline, share(global_batch(0), pipeline.data_rank, pipeline.num_data_ranks)


def _describe_two_ranks(world: World) -> dict[str, Any]:
    """Where a model is split, what is refused, and what is saved and taken back."""
    found: dict[str, Any] = {}
    for name, learnable, schedule in (
        ("too few cuts", cut_at("blocks.2"), "zbv"),
        ("inside a residual", cut_at("blocks.1.inner"), "1f1b"),
    ):
        with pytest.raises(PlanError) as caught:  # on every rank alike: the group is usable
            build_stages(world, "decoder", learnable, schedule=schedule)
        found[name] = str(caught.value)
    for schedule in ("1f1b", "zbv"):
        pipeline, _ = build_stages(world, schedule=schedule)
        found[schedule] = [each.module for each in pipeline.partition.split_points]
    pipeline, batch = build_stages(world, "decoder", cut_at("blocks.2"))
    optimizer = torch.optim.Adam([parameter for _, parameter in pipeline.named_parameters()])
    pipeline.train_step(batch, 0)
    optimizer.step()
    saved = {name: value.clone() for name, value in pipeline.model_state().items()}
    settings = pipeline.optimizer_state(optimizer)
    optimizer.step()
    found["changed"] = any(not torch.equal(saved[name], value) for name, value in pipeline.model_state().items())
    pipeline.load_model_state(saved)
    pipeline.load_optimizer_state(optimizer, settings)
    found["back"] = all(torch.equal(saved[name], value) for name, value in pipeline.model_state().items())
    with pytest.raises(SpecMismatch, match="other"):
        pipeline.load_model_state(saved | {"other": torch.zeros(1)})
    bytes_of = [parameter.untyped_storage().nbytes() for parameter in pipeline.modules[0].parameters()]
    more = {"names": set(saved), "optimizer": set(settings), "bytes": sum(bytes_of)}
    return found | more | {"waited_s": pipeline.communication_s, "idle": measure_idle_share(pipeline)}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(_describe_two_ranks, 2)


def test_each_rank_keeps_its_stages_only(two_ranks: list[dict[str, Any]]) -> None:
    first, last = (found["names"] for found in two_ranks)
    assert first & last == {"embedding.weight", "head.weight"}  # tied: both have it
    assert {"positions", "mask", "blocks.1.inner.weight", "unused.weight"} <= first
    assert {"blocks.2.inner.weight", "norm.bias"} <= last
    total = sum(parameter.numel() * 4 for parameter in Decoder().parameters())
    assert all(found["bytes"] < 0.85 * total for found in two_ranks)


def test_stages_are_split_between_blocks(two_ranks: list[dict[str, Any]]) -> None:
    """Their times are measured, so on a busy machine the middle may be anywhere between two of them."""
    (split_point,) = two_ranks[0]["1f1b"]
    assert split_point in {"blocks.1", "blocks.2", "blocks.3", "norm"}
    assert all(len(found["zbv"]) == 3 for found in two_ranks)


def test_state_is_saved_and_restored(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert (found["changed"], found["back"]) == (True, True)
        assert "embedding.weight" in found["optimizer"]
        assert found["waited_s"] > 0
        assert 0 < found["idle"] < 1


def test_what_cannot_be_split_is_refused_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert "name 3 of its modules" in found["too few cuts"]
        assert "blocks.1.inner" in found["inside a residual"]
        assert "cut at" in found["inside a residual"]


def _die(world: World, how: str) -> None:
    class Fails(Classifier):
        calls = 0

        def loss(self, outputs: Any, batch: Any) -> Tensor:
            self.calls += 1
            if world.rank == 1 and self.calls == 6:  # the second step's second micro-batch
                if how == "exit":
                    os._exit(7)
                raise ZeroDivisionError("of the user's own")
            return super().loss(outputs, batch)

    pipeline, batch = build_stages(world, "decoder", Fails())
    for step in range(3):
        pipeline.train_step(batch, step)


@pytest.mark.parametrize(
    ("how", "cause"), [("exit", "died with exit code 7"), ("raise", "ZeroDivisionError: of the user's own")]
)
def test_a_rank_that_fails_ends_the_others(how: str, cause: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_die, 2, how)
    assert cause in caught.value.causes[1]
    assert "did not end" not in caught.value.causes[0]
    assert "RuntimeError" in caught.value.causes[0]


class Chooses(nn.Module):
    """The last of its layers is another one in every pass, as a router's is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(4))
        self.register_buffer("choice", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.experts[int(self.choice)](self.middle(self.embedding(tokens)))[:, -1]


def _choose_another(world: World) -> str:
    pipeline, batch = build_stages(world, Chooses, cut_at("middle"))
    pipeline.train_step(batch, 0)
    pipeline.modules[0].choice.fill_(2)
    pipeline.train_step(batch, 1)
    return ""


def test_a_layer_that_no_stage_was_seen_to_run_is_not_run_without_its_weights() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_choose_another, 2)
    assert "experts.2'" in caught.value.causes[1]
    assert "was not called in this stage" in caught.value.causes[1]


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        return x @ (self.right if int(choice) else self.left)


class Eithers(nn.Module):
    """Two blocks, each of which uses one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Either() for _ in range(2))
        self.register_buffer("choice", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.choice)
        return self.head(x)[:, -1]


def _use_unlike(world: World) -> tuple[list[float], str]:
    """The second data rank uses other parameters: how far gradients are from one process's, and the error without
    `dynamic`."""
    learnable = cut_at("blocks.1")
    plan = {"data": 2, "shard": True}
    full_model = make(Eithers)
    pipeline, batch = build_stages(world, Eithers, learnable, **plan, dynamic=True)
    pipeline.modules[0].choice.fill_(pipeline.data_rank)
    pipeline.train_step(batch, 0)
    for choice in (0, 1):
        part = share(global_batch(0), choice, 2)
        full_model.choice.fill_(choice)
        (learnable.loss(full_model(part[0]), part) / 2).backward()
    expected = dict(full_model.named_parameters())
    pairs = [(full(each.grad), expected[name].grad) for name, each in pipeline.named_parameters()]
    pipeline, batch = build_stages(world, Eithers, learnable, **plan)
    pipeline.modules[0].choice.fill_(pipeline.data_rank)
    with pytest.raises(PlanError) as caught:
        pipeline.train_step(batch, 0)
    return [float((mine - theirs).abs().max()) for mine, theirs in pairs], str(caught.value)


def test_data_ranks_of_sharded_stages_may_use_other_parameters_where_that_was_said() -> None:
    for rank, (differences, refused) in enumerate(run_ranks(_use_unlike, 4)):
        assert max(differences) < TOLERANCE
        assert f"blocks.{rank // 2}.left has a gradient on one of the data ranks 0 and 1" in refused


CPU = torch.device("cpu")
LENGTHS = [(5, 5), (5, 3), (4, 5), (3, 4), (2, 2), (5, 3)]  # of the samples of each data rank, by step


class Cut(Classifier):
    cuts: list[str] | None = ["4"]  # noqa: RUF012


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def _share(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    length = LENGTHS[step][rank]
    features = torch.randn(4, length, 6, generator=generator)
    return features, torch.randint(0, 3, (4, length), generator=generator)


def _stepped(world: World, shard: bool) -> list[dict[str, Tensor | None]]:
    """The gradients of each step. Three schedules are kept, of four that there are."""
    from shoal.parallel.pipeline import stages

    stages.MAX_SCHEDULES = 3
    spec = ParallelSpec.parse({"data": 2, "pipeline": 2, "micro_batches": 2, "shard": shard})
    degrees = spec.resolve_dims(world.size)
    at = degrees.coordinates(world.rank).data
    parallel = parallelize(_model(), Cut(), spec, degrees, world, _share(0, at), SEED)
    found = []
    for step in range(len(LENGTHS)):
        parallel.train_step(_share(step, at), step)
        found.append(whole_gradients(parallel.named_parameters()))
    parallel.close()
    return found


@pytest.mark.parametrize("shard", [False, True])
def test_shapes_may_change_and_differ_between_data_ranks(shard: bool) -> None:
    """Tolerance 1e-5: fp32 sums in another order."""
    ranks = run_ranks(_stepped, 4, shard)
    for step in range(len(LENGTHS)):
        model, learnable = _model(), Cut()
        for rank in (0, 1):
            share = _share(step, rank)
            share_of_labels = LENGTHS[step][rank] / sum(LENGTHS[step])  # the loss is a mean over labels
            (learnable.loss(model(share[0]), share) * share_of_labels).backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        for found in ranks:
            assert found[step]
            for name, gradient in found[step].items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)


def test_the_newest_schedules_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.parallel.pipeline.stages.MAX_SCHEDULES", 2)
    kept, forms = ScheduleCache(None, CPU), [shape_key((torch.zeros(2, length), torch.zeros(2))) for length in range(3)]
    for number, form in enumerate(forms[:2]):
        assert kept.is_missing(form)
        kept.put(form, number, {})
    assert kept.get(forms[0]) == (0, {})
    kept.put(forms[2], 2, {})
    assert [form in kept for form in forms] == [True, False, True]  # that of the second was not used for longest
    assert not kept.is_missing(forms[0])
