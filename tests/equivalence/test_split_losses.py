"""A loss with a denominator of its own (class weights, missing labels) does not depend on how a batch is split."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, ClassVar

import pytest
import torch
import torchmetrics
from benchmarks.ours.hidden_losses import LOSSES, OF_MODELS, OTHER, PLAIN
from benchmarks.ours.random_splits import judge
from cases import BATCH, LENGTH, VOCABULARY, build, full, global_batch, share
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from learnable import Classifier
from programs import run_ranks
from shoal.data import Data
from shoal.data.loader import make_loader
from shoal.errors import ConfigError
from shoal.parallel import ParallelSpec, World
from shoal.parallel.loss import Mean
from shoal.train.loop.evaluation import evaluate
from shoal.train.loop.split_check import SplitCheck
from shoal.train.stateful_metric import MetricSet

NUM_STEPS = 5
WEIGHTS = torch.linspace(0.1, 20.0, VOCABULARY)
# Relative to a parameter's norm, after five steps of SGD: sums are taken in another order.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


class ClassWeighted(Classifier):
    """Divides by the sum of the weights of the batch's classes."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        weights = WEIGHTS.to(outputs)
        total = functional.cross_entropy(outputs, batch[1], weights, reduction="sum")
        return Mean(total, weights[batch[1]].sum())

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        is_low = batch[1] < VOCABULARY // 3
        return {"low": Mean((outputs.argmax(-1) == batch[1])[is_low].sum(), is_low.sum())}


class FewLabels(ClassWeighted):
    """Three of four samples have no label: some micro-batches have none at all."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        labels = torch.where(batch[1] % 4 == 0, batch[1], -100)
        return Mean(functional.cross_entropy(outputs, labels, reduction="sum"), (labels >= 0).sum())


class NoLabels(ClassWeighted):
    """As in a batch of which nothing counts."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        labels = torch.full_like(batch[1], -100)
        return Mean(functional.cross_entropy(outputs, labels, reduction="sum"), (labels >= 0).sum())


class PlainWeighted(ClassWeighted):
    """The same as a scalar of torch's."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return functional.cross_entropy(outputs, batch[1], WEIGHTS.to(outputs))


class PlainFewLabels(ClassWeighted):
    """As `FewLabels`, as half of a scalar of torch's."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        labels = torch.where(batch[1] % 3 == 0, batch[1], -100)
        return nn.CrossEntropyLoss(label_smoothing=0.1)(outputs, labels) / 2


class ByHand(ClassWeighted):
    """A quotient, of which nothing says that numerator and denominator are sums over the samples."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        weights = WEIGHTS.to(outputs)
        return functional.cross_entropy(outputs, batch[1], weights, reduction="sum") / weights[batch[1]].sum()


class OwnStep(ClassWeighted):
    """By a `train_step` of its own, with a further loss that has another denominator."""

    def train_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        outputs = model(batch[0])
        labels = torch.where(batch[1] % 4 == 0, batch[1], -100)
        few = Mean(functional.cross_entropy(outputs, labels, reduction="sum"), (labels >= 0).sum())
        return {"loss": self.loss(outputs, batch), "few": few}


def make_blocks() -> nn.Module:
    """Without dropout and batch statistics, which are those of a micro-batch."""
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)) for _ in range(3)]
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 4), nn.Flatten(), nn.Linear(4 * LENGTH, 24), *blocks, nn.Linear(24, VOCABULARY)
    )


def make_double() -> nn.Module:
    return make_blocks().double()


def make_bf16() -> nn.Module:
    return make_blocks().bfloat16()


def train(learnable: Any, plan: dict[str, Any], world: World, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Losses, evaluation and weights. Collective."""
    factory = make_blocks if dtype == torch.float32 else make_double
    model = build(factory, ParallelSpec.parse(plan), world, learnable)
    optimizer = torch.optim.SGD([each for _, each in model.named_parameters()], 0.5)
    found: dict[str, Any] = {"losses": [], "further": []}
    for step in range(NUM_STEPS):
        loss = model.train_step(share(global_batch(step), model.data_rank, model.num_data_ranks), step)
        found["losses"].append(float(model.sum_over_data_ranks(loss) / model.num_data_ranks))
        if "few" in model.step_losses:
            few = model.sum_over_data_ranks(model.step_losses["few"]) / model.num_data_ranks
            found["further"].append(float(few))
        optimizer.step()
    batch = share(global_batch(99), model.data_rank, model.num_data_ranks)
    sums = model.evaluate(batch, len(batch[1]))
    found["evaluation"] = {name: model.sum_over_data_ranks(each).tolist() for name, each in sums.items()}
    found["weights"] = {name: full(each).clone() for name, each in model.full_weights().items()}
    model.close()
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    assert found["losses"] == pytest.approx(expected["losses"], rel=10 * tolerance)
    assert found["further"] == pytest.approx(expected["further"], rel=10 * tolerance)
    for name, sums in expected["evaluation"].items():
        assert found["evaluation"][name] == pytest.approx(sums, rel=10 * tolerance), name
    for name, weight in found["weights"].items():
        other = expected["weights"][name]
        assert float((weight - other).norm() / other.norm()) <= tolerance, name


ALONE = {"accumulate": 4}
TWO: list[dict[str, Any]] = [
    {},
    {"shard": True},
    {"accumulate": 2},
    {"shard": True, "accumulate": 4},
    {"data": 1, "tensor": 2},
    {"data": 1, "pipeline": 2, "micro_batches": 4},
]
LEARNABLES = (ClassWeighted, FewLabels, NoLabels, PlainWeighted)
CASES = [(learnable, plan, torch.float32) for learnable in LEARNABLES for plan in TWO]
CASES += [(FewLabels, plan, torch.float64) for plan in TWO if plan.get("tensor", 1) == 1]
CASES += [(PlainFewLabels, plan, torch.float32) for plan in TWO[-1:]]
CASES += [(OwnStep, plan, torch.float32) for plan in ({}, {"accumulate": 2})]


@pytest.mark.parametrize("learnable", [*LEARNABLES, PlainFewLabels, OwnStep])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_micro_batches_of_one_process(learnable: type, dtype: torch.dtype) -> None:
    assert_same(train(learnable(), ALONE, World.single("cpu"), dtype), train_alone(learnable, dtype), dtype)


@cache
def train_alone(learnable: type, dtype: torch.dtype) -> dict[str, Any]:
    return train(learnable(), {}, World.single("cpu"), dtype)


def _do_all(world: World) -> dict[str, Any]:
    """What tests below look at on two ranks."""
    plans = [train(learnable(), plan, world, dtype) for learnable, plan, dtype in CASES]
    sums = [_train_sometimes_sums(world, is_marked) for is_marked in (False, True)]
    return {
        "plans": plans,
        "sums": sums,
        "checks": _check_all(world),
        "draws": _judge_splits(world),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(_do_all, 2)


def test_every_plan_of_two_ranks(two_ranks: list[dict[str, Any]]) -> None:
    for index, (learnable, _, dtype) in enumerate(CASES):
        for found in (rank["plans"][index] for rank in two_ranks):
            assert_same(found, train_alone(learnable, dtype), dtype)


def test_a_batch_without_any_label_changes_nothing() -> None:
    found = train(NoLabels(), ALONE, World.single("cpu"))
    before = build(make_blocks, ParallelSpec(), World.single("cpu"), NoLabels()).full_weights()
    assert found["losses"] == [0.0] * NUM_STEPS
    assert all(torch.equal(weight, before[name]) for name, weight in found["weights"].items())


def _check(
    learnable: Any,
    plan: dict[str, Any],
    world: World,
    make: Callable[[], nn.Module] = make_blocks,
    num_parts: int = 1,
    evaluates: bool = False,
) -> str:
    model = build(make, ParallelSpec.parse(plan), world, learnable)
    batch = share(global_batch(0), model.data_rank, model.num_data_ranks)
    try:
        check = SplitCheck(model, world, "Weighted", len(batch[1]) // num_parts, evaluates=evaluates)
        check.watch(batch)
        check.verify()
    except ConfigError as error:
        return str(error)
    finally:
        model.close()
    return ""


class PlainMean(ClassWeighted):
    """The mean over the samples."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return functional.cross_entropy(outputs, batch[1])


class RaisesForOne(PlainMean):
    """For a sample that one rank has, and alone."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        if len(batch[1].unique()) == 1 and (batch[0] == global_batch(0)[0][0]).all(-1).any():
            raise ValueError("one class alone")
        return super().loss(outputs, batch)


class RaisingMetric(PlainMean):
    """Likewise."""

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        return {"one": RaisesForOne().loss(outputs, batch)}


def _check_all(world: World) -> list[str]:
    for plan in TWO:
        assert "raises 'one class alone' for one sample" in _check(RaisesForOne(), plan, world)
        metrics = _check(RaisingMetric(), plan, world, evaluates=True)
        assert "Task.metrics = 'loss, one': raises 'one class alone' for one sample" in metrics
    found = [_check(learnable(), plan, world) for learnable in (ByHand, PlainWeighted) for plan in TWO]
    return [*found, *(_check(PlainMean(), {**plan, "precision": "bf16"}, world) for plan in (TWO[0], TWO[-1]))]


def test_the_first_step_rejects_a_scalar_that_is_no_mean_over_samples(two_ranks: list[dict[str, Any]]) -> None:
    for found in (rank["checks"] for rank in two_ranks):
        rejected, accepted = found[: len(TWO)], found[len(TWO) :]
        assert all("shoal.Mean(total, count)" in each and "check_loss=false" in each for each in rejected), rejected
        assert not any(accepted)


class Drawn(PlainWeighted):
    """Adds noise, as losses of diffusion do: its value says nothing about its parts."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return functional.cross_entropy(outputs + torch.randn_like(outputs), batch[1])


class PlainStep(ClassWeighted):
    """A step of its own whose scalar is no mean over the samples."""

    def train_step(self, model: nn.Module, batch: Any) -> Tensor:
        return ByHand().loss(model(batch[0]), batch)


class RoundedWeighted(ClassWeighted):
    """Computed in bf16, of a network in float32."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return functional.cross_entropy(outputs.bfloat16(), batch[1], WEIGHTS.bfloat16())


class InPlace(ClassWeighted):
    """Changes the mean in place, which is no longer what was seen."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        loss = functional.cross_entropy(outputs, batch[1], WEIGHTS)
        loss *= 3.0
        return loss


class RelativeToItself(ClassWeighted):
    """Always 1, with the gradients of a logarithm."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        loss = functional.cross_entropy(outputs, batch[1])
        return loss / loss.detach()


@pytest.mark.parametrize(
    ("learnable", "make", "problem"),
    [
        *((each, make_blocks, "") for each in (Drawn, RoundedWeighted)),
        (PlainMean, make_bf16, ""),
        (PlainStep, make_blocks, "the mean of its parts"),
        (RelativeToItself, make_blocks, "the gradient"),
        (InPlace, make_blocks, "shoal.Mean"),
    ],
)
def test_what_the_check_can_judge(learnable: type, make: Callable[[], nn.Module], problem: str) -> None:
    build(make, ParallelSpec.parse(ALONE), World.single("cpu"), learnable())  # which seeds
    state = torch.get_rng_state()
    found = _check(learnable(), ALONE, World.single("cpu"), make)
    assert problem in found if problem else found == ""
    assert torch.equal(torch.get_rng_state(), state)


class Counting(ByHand):
    """Remembers the sizes of its batches, and those of its copies."""

    sizes: ClassVar[list[int]] = []

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        self.sizes.append(len(outputs))
        return super().loss(outputs, batch)


def test_the_check_takes_no_more_memory_than_a_micro_batch_or_three_samples() -> None:
    for num_parts, sizes in ((4, {4, 2}), (BATCH, {3, 2})):
        task = Counting()
        task.sizes.clear()
        assert "the mean of its parts" in _check(
            task, {"accumulate": num_parts}, World.single("cpu"), num_parts=num_parts
        )
        assert set(task.sizes) == sizes


class QueueStep(ClassWeighted):
    """Fills a queue, as a contrast with earlier samples does."""

    def train_step(self, model: nn.Module, batch: Any) -> Tensor:
        queue = model.get_buffer("queue")
        queue += 1
        return functional.cross_entropy(model(batch[0]), batch[1]) * queue[0].item()


def make_with_queue() -> nn.Module:
    model = make_blocks()
    model.register_buffer("queue", torch.zeros(1))
    return model


def test_the_check_changes_no_buffer() -> None:
    model = build(make_with_queue, ParallelSpec.parse(ALONE), World.single("cpu"), QueueStep())
    check = SplitCheck(model, World.single("cpu"), "Queue", BATCH)
    check.watch(global_batch(0))
    check.verify()
    assert not model.model_state()["queue"].any()


class SometimesMean(ClassWeighted):
    """A scalar where nothing counts."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        found = super().loss(outputs, batch)
        return found if (batch[1] == global_batch(0)[1][0]).any() else outputs.sum() * 0.0


class Rows(ClassWeighted):
    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return Mean(functional.cross_entropy(outputs, batch[1], reduction="none"), BATCH)


class Learnt(ClassWeighted):
    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return Mean(functional.cross_entropy(outputs, batch[1], reduction="sum"), outputs.exp().sum())


@pytest.mark.parametrize(
    ("learnable", "plan", "problem"),
    [
        (Rows, {}, r"total.*add the total up to a scalar"),
        (Learnt, {}, r"count has a gradient.*detach"),
        (SometimesMean, ALONE, r"is a shoal\.Mean.* for some batches.*one of count 0 adds nothing"),
    ],
)
def test_a_mean_that_is_none_is_rejected(learnable: type, plan: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        train(learnable(), plan, World.single("cpu"))


def test_a_mean_of_any_count_is_the_quotient() -> None:
    assert Mean(torch.tensor(6.0), -2.0).value() == -3.0
    assert Mean(torch.tensor(6.0), torch.tensor(float("nan"))).value().isnan()
    assert Mean(torch.tensor(0.0), 0).value() == 0.0
    assert Mean(torch.ones((), dtype=torch.bfloat16), 1001).value() == torch.tensor(1.0 / 1001)


class TwiceStep(ClassWeighted):
    """Two steps of one optimiser, with noise."""

    def __init__(self) -> None:
        self.noise: list[float] = []

    def train_step(self, model: nn.Module, batch: Any) -> Iterator[tuple[str, Any]]:
        for _ in range(2):
            self.noise.append(float(torch.rand(())))
            yield "own", self.loss(model(batch[0]), batch)


def test_an_optimizer_that_takes_two_steps_has_the_sum_of_both_losses() -> None:
    task = TwiceStep()
    model = build(make_blocks, ParallelSpec.parse(ALONE), World.single("cpu"), task)
    model.use_optimizers({"own": [each for _, each in model.named_parameters()]}, lambda name: None)
    total = model.train_step(global_batch(0), 0)
    assert float(model.step_losses["own_loss"]) == pytest.approx(float(total))
    assert len(set(task.noise)) == 2 * ALONE["accumulate"]  # each part of each step draws its own


NEVER_REFUSED = {name: {"equal"} for name in PLAIN}
ALLOWED = {**{name: {"equal", "refused", "refused though right"} for name in OTHER}, **NEVER_REFUSED}


@pytest.mark.parametrize("name", LOSSES)
def test_random_splits_are_never_silent_and_wrong(name: str) -> None:
    index = list(LOSSES).index(name)
    assert judge(name, 1000 * index) in ALLOWED[name]


FOR_TWO = [name for name in LOSSES if name not in OF_MODELS][::8]


def _judge_splits(world: World) -> dict[str, str]:
    return {name: judge(name, seed, world) for seed, name in enumerate(FOR_TWO)}


def test_random_splits_over_two_ranks_are_never_silent_and_wrong(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        for name, verdict in rank["draws"].items():
            assert verdict in ALLOWED[name], name


class LabelsAndPenalty(ClassWeighted):
    """A sum, of which only labels that are ignored show that it has two denominators."""

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return functional.cross_entropy(outputs, batch[1]) + 0.1 * outputs.square().mean()


def test_a_missing_label_that_comes_late_in_a_large_tensor_is_looked_at() -> None:
    world = World.single("cpu")
    check = SplitCheck(build(make_blocks, ParallelSpec(), world, PlainMean()), world, "Texts", 4)
    labels = torch.arange(4 * 16_384).reshape(4, -1) + 1000
    for _ in range(70):
        check.watch((torch.ones(4, 3), labels))
    check._chosen.clear()
    check.watch((torch.ones(4, 3), labels))
    assert not check._chosen
    labels[1, 7:] = -100
    check.watch((torch.ones(4, 3), labels))
    assert any(trait.kind == -100 for _, counts in check._chosen for trait in counts)


def test_a_batch_with_another_trait_is_checked_too() -> None:
    model = build(make_blocks, ParallelSpec.parse(ALONE), World.single("cpu"), LabelsAndPenalty())
    check = SplitCheck(model, World.single("cpu"), "LateLabels", 4)
    for step in range(37):
        check.watch(global_batch(step))
        check.verify()
    x, labels = global_batch(37)
    labels[3] = -100
    check.watch((x, labels))
    with pytest.raises(ConfigError, match=r"Task\.loss = 'LateLabels': gives .* mean of its parts.*shoal\.Mean"):
        check.verify()


class SometimesSum(ClassWeighted):
    """A mean of torch's, or two of them for some batches, as with mixed samples that are drawn with a probability."""

    def __init__(self, is_first: bool, is_marked: bool = False) -> None:
        self._is_sum, self._is_marked = not is_first, is_marked

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        self._is_sum = not self._is_sum
        loss = functional.cross_entropy(outputs, batch[1])
        if self._is_sum:
            loss = 0.3 * loss + 0.7 * functional.cross_entropy(outputs, batch[1].flip(0))
        return Mean(loss * len(outputs), len(outputs)) if self._is_marked else loss


def _train_sometimes_sums(world: World, is_marked: bool) -> list[dict[str, Any]]:
    firsts = (True, False, world.rank == 0) if world.size > 1 else (True, False)
    plans = [{"accumulate": 2}] * 2 + [{}]
    pairs = zip(firsts, plans, strict=False)
    return [train(SometimesSum(first, is_marked), plan, world) for first, plan in pairs]


def test_a_mean_whose_terms_all_count_may_be_a_part_of_the_loss_for_some_batches(
    two_ranks: list[dict[str, Any]],
) -> None:
    alone = [_train_sometimes_sums(World.single("cpu"), is_marked) for is_marked in (False, True)]
    for found, expected in (*zip(*alone, strict=True), *zip(*two_ranks[0]["sums"], strict=True)):
        assert_same(found, expected, torch.float32)


class Teacher(PlainFewLabels):
    """Calls a teacher without gradients, and keeps an average of its loss."""

    def __init__(self) -> None:
        self.average = torch.zeros(())

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        with torch.inference_mode():
            teacher = outputs.detach() * 2
            functional.cross_entropy(teacher, batch[1]) + teacher[batch[1] > 3].mean() + teacher.sum()
        loss = super().loss(outputs, batch)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss


def test_what_a_task_computes_beside_its_loss_is_not_followed_further() -> None:
    task = Teacher()
    assert_same(
        train(task, ALONE, World.single("cpu")), train(PlainFewLabels(), {}, World.single("cpu")), torch.float32
    )


class Pool(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values / values.square().sum(-1, keepdim=True).add(1.0).sqrt()


def make_with_pool() -> nn.Module:
    return nn.Sequential(*make_blocks(), Pool())


def test_a_compiled_model_within_a_step_stays_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[str] = []

    def compile_eagerly(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compile_eagerly))
    model = build(make_with_pool, ParallelSpec.parse({**ALONE, "compile": True}), World.single("cpu"), OwnStep())
    model.train_step(global_batch(0), 0)
    assert len(graphs) == 1


class Evaluated(ClassWeighted):
    """Metrics over the samples that have a label."""

    forms: ClassVar[dict[str, Callable[[Tensor, Tensor], Any]]] = {
        "divided": lambda right, known: (right * known).sum() / known.sum().clamp(min=1),
        "selected": lambda right, known: right[known].mean(),
        "root": lambda right, known: (right - known.float()).square().mean().sqrt(),
        "mean": lambda right, known: right.mean(),
        "marked": lambda right, known: Mean((right * known).sum(), known.sum()),
    }

    def __init__(self, form: str) -> None:
        self.form = form

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        return {self.form: self.forms[self.form](outputs.sigmoid()[:, 0], batch[1] >= VOCABULARY // 3)}


@pytest.mark.parametrize("form", Evaluated.forms)
def test_a_metric_that_depends_on_the_batch_size_is_refused_by_name(form: str) -> None:
    data = Data(train=[], validation=TensorDataset(*global_batch(0)))
    values = []
    for size in (4, 6, BATCH):
        model = build(make_blocks, ParallelSpec(), World.single("cpu"), Evaluated(form))
        check = SplitCheck(model, World.single("cpu"), "Evaluated", size, evaluates=True)
        is_refused = form in ("divided", "selected", "root") and size < BATCH  # a whole set is evaluated rightly
        match = rf"Task\.metrics = '{form}': gives .* mean of its parts.*shoal\.Mean\(total, count\).*stateful_metrics"
        with pytest.raises(ConfigError, match=match) if is_refused else nullcontext():
            values.append(evaluate(model, make_loader(data, "validation", batch_size=size), None, check))
    assert all(each == pytest.approx(values[0]) for each in values)


class AfterNoise(Evaluated):
    """A metric that cannot be compared comes before the one of `form`."""

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        return {"noise": torch.rand(()), **super().metrics(outputs, batch)}


def test_a_metric_after_one_that_is_drawn_is_checked_too() -> None:
    assert "'divided': gives" in _check(AfterNoise("divided"), {}, World.single("cpu"), evaluates=True)


class Counted(ClassWeighted):
    """Counts samples wherever it sees them, until an evaluation ends."""

    def __init__(self) -> None:
        self.number = 0
        self.total = torch.zeros(())
        self.kept = {"sizes": list[int]()}

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        self.total += len(outputs)
        self.kept["sizes"].append(len(outputs))
        return {}

    def update_metric(self, name: str, metric: Any, outputs: Tensor, batch: Any) -> None:
        self.number += len(outputs)
        metric.update(outputs)

    def finish_evaluation(self) -> dict[str, float]:
        shares = float(self.total) / self.number, sum(self.kept["sizes"]) / self.number
        self.__init__()  # type: ignore[misc]
        return dict(zip(("total", "kept"), shares, strict=True))


def test_an_evaluation_is_finished_once_and_counts_no_sample_of_the_check() -> None:
    data = Data(train=[], validation=TensorDataset(*global_batch(0)))
    task = Counted()
    world = World.single("cpu")
    model = build(make_blocks, ParallelSpec(), world, task)
    stateful = MetricSet({"mean": torchmetrics.MeanMetric()}, task.update_metric, world, True, task.finish_evaluation)
    check = SplitCheck(model, world, "Counted", 4, evaluates=True)
    for _ in range(2):
        found = evaluate(model, make_loader(data, "validation", batch_size=4), stateful, check)
        assert (found["total"], found["kept"]) == (1.0, 1.0)
