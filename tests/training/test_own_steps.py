"""Tasks with a step of their own: a GAN with two optimisers, a distillation with two losses; metrics with a state; and
callbacks. Alone and on two ranks."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

from programs import run_ranks
from shoal import testing
from shoal.data import Data
from shoal.errors import ConfigError, PlanError
from shoal.parallel import World
from shoal.train import Callback, Task, TrainingState
from shoal.train.launch.validate import validate_run
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec

ROWS = 96
TOLERANCE = 1e-5  # sums over ranks are taken in another order
LEARNING = {"stop": {"steps": 60}, "optimizer": {"learning_rate": 0.05}}
# 40 samples in each batch of an evaluation: the last one is smaller, and unequal on two ranks.
UNEVEN = {"evaluate": {"every_steps": 3, "batch_size": 40}}

Trained = tuple[TrainResult, dict[str, list[float]], dict[str, Tensor]]


def make_points(count: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(count, 4, generator=generator)
    return points, (points[:, 0] + 0.5 * torch.randn(count, generator=generator) > 0).long()


class Gan(nn.Module):
    """As it is served: noise to points."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, noise: Tensor) -> Tensor:
        outputs: Tensor = self.generator(noise)
        return outputs


def judge(model: Gan, points: Tensor, *, is_real: bool) -> Tensor:
    logits = model.discriminator(points)
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


class GanTask(Task):
    """A batch is (noise, real points)."""

    def model(self) -> nn.Module:
        return Gan()

    def data(self) -> Data:
        points, _ = make_points()
        return Data(train=TensorDataset(points[:, :2].flip(0), points), validation=TensorDataset(points[:, :2], points))

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        assert isinstance(model, Gan)
        return {
            "discriminator": Adam(model.discriminator.parameters(), lr=0.01),
            "generator": SGD(model.generator.parameters(), lr=0.05, momentum=0.9),
        }

    def train_step(self, model: nn.Module, batch: Any) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(model, Gan)
        noise, real = batch
        fake = model.generator(noise)
        yield "discriminator", judge(model, real, is_real=True) + judge(model, fake.detach(), is_real=False)
        yield "generator", judge(model, fake, is_real=True)

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return {"distance": (outputs - batch[-1]).square().mean()}


class Distillation(Task):
    """A student between the labels and a frozen teacher: two losses, one optimiser."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def data(self) -> Data:
        points = TensorDataset(*make_points())
        return Data(train=points, validation=points)

    def train_step(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        points, labels = batch
        logits, teacher = model(points), torch.stack([-points[:, 0], points[:, 0]], dim=1)
        hard = functional.cross_entropy(logits, labels)
        soft = functional.kl_div(logits.log_softmax(1), teacher.softmax(1), reduction="batchmean")
        return {"loss": hard + 2 * soft, "hard": hard, "soft": soft}

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(outputs, batch[-1])

    def stateful_metrics(self) -> Mapping[str, Any]:
        return {"auroc": torchmetrics.AUROC(task="binary"), "f1": torchmetrics.F1Score(task="binary")}

    def update_metric(self, name: str, metric: Any, outputs: Any, batch: Any) -> None:
        metric.update(outputs.softmax(1)[:, 1], batch[-1])


class Counting(Callback):
    """Stops after three steps, and notes what it was shown."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_begin(self, state: TrainingState) -> None:
        self.calls.append(("begin", state.step))

    def on_step(self, state: TrainingState) -> None:
        assert state.loss is not None
        self.calls.append(("step", state.step))
        state.log({"watched/loss": float(state.loss)})
        if state.step == 3:
            state.request_stop("seen enough")

    def on_evaluation(self, state: TrainingState) -> None:
        self.calls.append((f"evaluation of {', '.join(sorted(state.metrics))}", state.step))

    def on_epoch_end(self, state: TrainingState) -> None:
        self.calls.append(("epoch", state.step))

    def on_end(self, state: TrainingState) -> None:
        self.calls.append(("end", state.step))


class UntilEpoch(Counting):
    """Stops at the end of the second epoch, on one rank."""

    def on_step(self, state: TrainingState) -> None:
        assert state.loss is not None

    def on_epoch_end(self, state: TrainingState) -> None:
        if state.epoch == 2 and state.is_first:
            state.request_stop("two epochs")


class Watched(Distillation):
    def __init__(self, counting: Counting | None = None) -> None:
        self.counting = counting or Counting()

    def callbacks(self) -> list[Callback]:
        return [self.counting]


def spec_of(**changes: Any) -> TrainSpec:
    base = {"task": "own", "batch_size": 32, "stop": {"steps": 6}, "log_every_steps": 1, "seed": 3}
    return TrainSpec.parse({**base, **changes})


def train(world: World, folder: Path, task: Task, spec: TrainSpec) -> Trained:
    run = testing.train(task, home=folder, spec=spec, world=world)
    names = {name for values in run.log.metrics.values() for name in values}
    return run.result, {name: [*run.log.get_curve(name).values()] for name in names}, run.weights


def train_alone(folder: Path, task: Task, **changes: Any) -> Trained:
    return train(World.single("cpu"), folder, task, spec_of(**changes))


def step_gan_by_hand(model: Gan, optimizers: Mapping[str, Optimizer], noise: Tensor, real: Tensor) -> None:
    fake = model.generator(noise)
    for name, loss in (
        ("discriminator", lambda: judge(model, real, is_real=True) + judge(model, fake.detach(), is_real=False)),
        ("generator", lambda: judge(model, fake, is_real=True)),
    ):
        model.zero_grad()
        loss().backward()
        optimizers[name].step()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gan_takes_the_steps_that_its_loop_by_hand_would(tmp_path: Path, accumulate: int) -> None:
    seen: list[Any] = []

    class Noting(GanTask):
        def train_step(self, model: nn.Module, batch: Any) -> Iterator[tuple[str, Tensor]]:
            seen.extend([batch] * model.training)  # the check of split losses takes steps in evaluation mode
            yield "size", torch.tensor(float(len(batch[0])))
            yield from super().train_step(model, batch)

    torch.manual_seed(3)
    by_hand = Gan()
    _, values, weights = train_alone(tmp_path, Noting(), parallel={"accumulate": accumulate})
    optimizers = GanTask().optimizers(by_hand)
    for first in range(0, len(seen), accumulate):
        noise, real = (torch.cat(parts) for parts in zip(*seen[first : first + accumulate], strict=True))
        step_gan_by_hand(by_hand, optimizers, noise, real)
    assert weights.keys() == by_hand.state_dict().keys()
    for name, value in by_hand.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=TOLERANCE)
    assert len(values["train/discriminator_loss"]) == len(values["train/generator_loss"]) == 6
    total = np.array(values["train/discriminator_loss"]) + values["train/generator_loss"]
    np.testing.assert_allclose(total, values["train/loss"], rtol=1e-6)
    assert values["train/size"] == [32.0 / accumulate] * 6  # recorded, and not optimized
    assert "validation/distance" in values
    assert "validation/loss" not in values


def train_cases(world: World, folder: Path, cases: Mapping[str, tuple[Task, TrainSpec]]) -> dict[str, Trained]:
    """The program of a rank: one run after the other."""
    return {name: train(world, folder / name, task, spec) for name, (task, spec) in cases.items()}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Trained]]:
    """What each of two ranks has trained, by case: starting ranks is what takes time."""
    gan = {"workers": 2, "clip_norm": 0.5}
    cases = {
        "gan": (GanTask(), spec_of(parallel={"data": 2}, **gan)),
        "gan gloo": (GanTask(), spec_of(parallel={"data": 2, "backend": "gloo"}, **gan)),
        "metrics": (Distillation(), spec_of(workers=2, **UNEVEN)),
        "distillation": (Distillation(), spec_of(workers=2, **LEARNING)),
        "watched": (Watched(), spec_of(workers=2, stop={"steps": 100_000})),
        "epochs": (Watched(UntilEpoch()), spec_of(workers=2, stop={"steps": 100_000})),
    }
    return run_ranks(train_cases, 2, tmp_path_factory.mktemp("ranks"), cases)


def test_a_gan_on_two_ranks_takes_the_steps_of_one_process(
    tmp_path: Path, on_two_ranks: list[dict[str, Trained]]
) -> None:
    _, values, weights = train_alone(tmp_path, GanTask(), clip_norm=0.5)
    for case in ("gan", "gan gloo"):
        (_, theirs, first), (_, _, second) = (rank[case] for rank in on_two_ranks)
        for key, value in weights.items():
            torch.testing.assert_close(first[key], value, rtol=0, atol=TOLERANCE)
            assert first[key].equal(second[key])
        np.testing.assert_allclose(theirs["train/generator_loss"], values["train/generator_loss"], atol=TOLERANCE)


def test_a_gan_that_is_resumed_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    _, _, weights = train_alone(tmp_path / "once", GanTask())
    train_alone(tmp_path / "twice", GanTask(), stop={"steps": 4})
    _, _, resumed = train_alone(tmp_path / "twice", GanTask())
    for name, value in weights.items():
        assert resumed[name].equal(value), name


@pytest.mark.parametrize("workers", [1, 2])
def test_a_distillation_logs_each_loss(tmp_path: Path, on_two_ranks: list[dict[str, Trained]], workers: int) -> None:
    alone = train_alone(tmp_path, Distillation(), **LEARNING) if workers == 1 else None
    _, values, _ = alone or on_two_ranks[0]["distillation"]
    hard, soft = np.array(values["train/hard"]), np.array(values["train/soft"])
    np.testing.assert_allclose(hard + 2 * soft, values["train/loss"], rtol=1e-5)
    assert soft[-1] < soft[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_metrics_with_a_state_are_those_over_all_samples(
    tmp_path: Path, on_two_ranks: list[dict[str, Trained]], workers: int
) -> None:
    alone = train_alone(tmp_path, Distillation(), **UNEVEN) if workers == 1 else None
    result, values, weights = alone or on_two_ranks[0]["metrics"]
    points, labels = make_points()
    model = nn.Linear(4, 2)
    model.load_state_dict(weights)
    scores = model(points).softmax(1)[:, 1]
    expected = {
        "auroc": torchmetrics.functional.auroc(scores, labels, task="binary"),
        "f1": torchmetrics.functional.f1_score(scores, labels, task="binary"),
    }
    for name, value in expected.items():
        assert result.metrics[name] == pytest.approx(float(value), abs=1e-6)
        assert len(values[f"validation/{name}"]) == 2
    assert alone or on_two_ranks[1]["metrics"][0].metrics == result.metrics


def test_a_target_may_be_a_metric_with_a_state(tmp_path: Path) -> None:
    result, _, _ = train_alone(tmp_path, Distillation(), stop={"steps": 200, "target": "auroc>=0.5"})
    assert result.reason == "target"
    assert result.detail.startswith("auroc")


def test_callbacks_see_the_run_and_may_end_it(tmp_path: Path) -> None:
    task = Watched()
    result, values, _ = train_alone(tmp_path, task)
    assert (result.reason, result.steps, result.detail) == ("callback", 3, "seen enough, at step 3")
    assert task.counting.calls == [
        ("begin", 0),
        *[("step", step) for step in (1, 2, 3)],
        ("evaluation of auroc, f1, loss", 3),
        ("epoch", 3),
        ("end", 3),
    ]
    assert values["watched/loss"] == pytest.approx(values["train/loss"])


def test_a_callback_ends_the_run_on_all_ranks(on_two_ranks: list[dict[str, Trained]]) -> None:
    results = [rank["watched"][0] for rank in on_two_ranks]
    assert {result.reason for result in results} == {"callback"}
    assert len({result.steps for result in results}) == 1
    assert [rank["epochs"][0].steps for rank in on_two_ranks] == [6, 6]  # at once


def refuse(task: Task, folder: Path, kind: type[Exception], match: str, **changes: Any) -> None:
    with pytest.raises(kind, match=match):
        train_alone(folder, task, **changes)


def test_own_steps_that_cannot_be_taken_are_rejected_by_name(tmp_path: Path) -> None:
    class Vector(Distillation):
        def train_step(self, model: nn.Module, batch: Any) -> Any:
            return model(batch[0]).mean(0)

    class Unnamed(Distillation):
        def train_step(self, model: nn.Module, batch: Any) -> Any:
            return {"hard": model(batch[0]).mean()}

    class Stranger(GanTask):
        def train_step(self, model: nn.Module, batch: Any) -> Iterator[tuple[str, Tensor]]:
            yield "critic", model(batch[0]).mean()

    class Partly(GanTask):
        def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
            return {"generator": super().optimizers(model)["generator"]}

    class Twice(GanTask):
        def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
            return {name: SGD(model.parameters(), lr=0.1) for name in ("discriminator", "generator")}

    class Alone(GanTask):
        train_step = None  # type: ignore[assignment]

        def loss(self, outputs: Any, batch: Any) -> Tensor:
            return outputs.mean()  # type: ignore[no-any-return]

    class Yielding(Distillation):
        def train_step(self, model: nn.Module, batch: Any) -> Any:
            yield "student", model(batch[0]).mean()

    refuse(Vector(), tmp_path / "1", ConfigError, r"a tensor \[2\]")
    refuse(Unnamed(), tmp_path / "2", ConfigError, "'loss'")
    refuse(Stranger(), tmp_path / "3", ConfigError, "yielded 'critic'.*discriminator, generator")
    refuse(Partly(), tmp_path / "4", ConfigError, "leaves out discriminator.0.weight")
    refuse(Twice(), tmp_path / "5", ConfigError, "more than one parameter group")
    refuse(Alone(), tmp_path / "6", ConfigError, "no train_step")
    refuse(Yielding(), tmp_path / "7", ConfigError, "write Task.optimizers")
    refuse(GanTask(), tmp_path / "8", PlanError, "use bf16", parallel={"precision": "fp16"})


@pytest.mark.parametrize("plan", ["fsdp", {"tensor": 2}, {"pipeline": 2}])
def test_plans_that_divide_the_model_reject_own_steps(plan: Any) -> None:
    spec = spec_of(task=f"{__file__}:GanTask", parallel=plan, workers=2)
    with pytest.raises(PlanError, match="train_step of its own"):
        validate_run(spec)


def test_validation_knows_the_metrics_of_a_task_without_a_loss() -> None:
    assert validate_run(spec_of(task=f"{__file__}:GanTask")).metric_names == ("distance",)
    assert validate_run(spec_of(task=f"{__file__}:Distillation")).metric_names == ("loss", "auroc", "f1")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"selective_backprop": {}}, "needs the loss of each sample"),
        ({"sync": "parameter_server", "workers": 2}, "servers apply the gradients of one"),
    ],
)
def test_what_does_not_go_with_several_optimizers_is_rejected(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        validate_run(spec_of(task=f"{__file__}:GanTask", **changes))
