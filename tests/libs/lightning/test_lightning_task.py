"""A LightningModule as a Task takes the steps that Lightning's own trainer takes, and its hooks are called alike."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.ours.lightning_modules import KINDS, judge, make_spec
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import shoal.runs
from programs import run_ranks
from shoal.errors import ConfigError
from shoal.libs.lightning.events import LightningEvents
from shoal.libs.lightning.hooks import HARMLESS, OBEYED, REFUSED
from shoal.libs.lightning.logs import Logs
from shoal.libs.lightning.task import LightningTask
from shoal.libs.lightning.trainer_view import TrainerAttributeError, TrainerView
from shoal.parallel import World
from shoal.registry import Registry
from shoal.serve.spec.batch_layout import BatchLayout
from shoal.serve.spec.model_options import ModelOptions
from shoal.train import TrainSpec
from shoal.train.export.signature import infer_signature
from shoal.train.launch.local import fit_locally
from shoal.train.launch.validate import validate_run
from shoal.train.loop.trainer import Trainer
from shoal.train.task import make_task
from shoal.weights.tensor_files import read_tensors

lightning = pytest.importorskip("pytorch_lightning")
torchmetrics = pytest.importorskip("torchmetrics")
MisconfigurationException = lightning.utilities.exceptions.MisconfigurationException
# What others of `benchmarks.lightning_modules` show, too.
SUBSUMED = {"Net", "StepEachEpoch", "Restarts", "PlateauOfEpochMeans", "ManualOne", "ZeroesToNone", "StopsEarly"}
# the last batch of an epoch has 5
NUM_SAMPLES = 45
BATCH = 8
EPOCHS = 3
_seen: list[tuple[Any, ...]] = []  # the hooks of the newest training


def _make_points(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Bare(lightning.LightningModule):  # type: ignore[misc]
    """What Lightning needs: no `forward`, no validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_make_points(NUM_SAMPLES, 1), batch_size=BATCH)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        schedule = OneCycleLR(optimizer, 0.05, total_steps=self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class BareTask(LightningTask):
    def module(self) -> Any:
        return Bare()


class Lines(Bare):
    """A regression that logs, with hooks, a metric of the epoch, and a schedule that follows one."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.error = torchmetrics.R2Score()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch)
        self.log("train_error", loss.sqrt(), prog_bar=True, on_epoch=True, sync_dist=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self(batch[0])
        self.error.update(outputs, batch[1])
        self.log_dict({"val_loss": nn.functional.mse_loss(outputs, batch[1]), "val_r2": self.error})

    def on_fit_start(self) -> None:
        trainer = self.trainer
        assert trainer.world_size == 1
        assert trainer.is_global_zero
        _seen[:] = [("fit", trainer.max_epochs, trainer.estimated_stepping_batches, self.hparams.form)]

    def on_train_epoch_start(self) -> None:
        _seen.append(("epoch", self.current_epoch, self.global_step, self.trainer.num_training_batches))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        _seen.append(("step", self.global_step, optimizer.param_groups[0]["lr"]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        _seen.append(("batch", batch_idx, len(batch[0]), self.global_step))

    def on_validation_epoch_end(self) -> None:
        _seen.append(("validated", self.current_epoch))
        self.log("val_r2_twice", 2 * self.error.compute())

    def on_train_epoch_end(self) -> None:
        _seen.append(("ended", self.current_epoch, float(self.trainer.callback_metrics["val_loss"])))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.03)
        if self.hparams.form == "plateau":
            schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


class Points(lightning.LightningDataModule):  # type: ignore[misc]
    def setup(self, stage: str) -> None:
        self.points, self.held_out = _make_points(NUM_SAMPLES, 1), _make_points(20, 2)

    def train_dataloader(self) -> DataLoader[Any]:
        weights, generator = torch.arange(1.0, NUM_SAMPLES + 1), torch.Generator().manual_seed(3)
        sampler = WeightedRandomSampler(weights.tolist(), NUM_SAMPLES, generator=generator)
        return DataLoader(self.points, batch_size=BATCH, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=BATCH)


class LinesTask(LightningTask):
    def __init__(self, *, form: str = "plateau") -> None:
        self.form = form

    def module(self) -> Lines:
        return Lines(self.form)

    def datamodule(self) -> Points:
        return Points()


def _spec(name: str, **fields: Any) -> TrainSpec:
    return TrainSpec(task=f"{LinesTask.__module__}:{name}", device="cpu", seed=7, **fields)


@pytest.mark.filterwarnings("ignore")  # of Lightning's own calls
@pytest.mark.parametrize("form", ["plateau", "step"])
def test_it_trains_as_lightnings_trainer_does(form: str, tmp_path: Path) -> None:
    spec = _spec("LinesTask", args={"form": form}, stop={"epochs": EPOCHS})
    result = fit_locally(spec)
    ours = list(_seen)
    torch.manual_seed(7)
    module = Lines(form)
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    silent |= {"num_sanity_val_steps": 0, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=EPOCHS, default_root_dir=tmp_path, **silent)
    trainer.fit(module, datamodule=Points())
    assert [each[:2] for each in ours] == [each[:2] for each in _seen]
    for one, other in zip(ours[1:], _seen[1:], strict=True):  # rates and losses
        assert one[2:] == pytest.approx(other[2:], rel=1e-4)
    assert ours[0] == _seen[0]
    for name in ("val_loss", "val_r2", "val_r2_twice"):
        assert result.metrics[name] == pytest.approx(float(trainer.callback_metrics[name]), rel=1e-4)
    weights = read_tensors(Registry().get("linestask").weight_file())
    for name, expected in module.state_dict().items():
        torch.testing.assert_close(weights[name], expected, msg=name)
    whole = shoal.runs.load(result.run_id).metrics()
    mean = whole["train/train_error_epoch"].dropna().iloc[-1]
    assert mean == pytest.approx(float(trainer.callback_metrics["train_error_epoch"]), rel=1e-4)
    assert "train/train_error" in whole.columns
    # A resumed run goes on with its schedule, the sampler's order and the batch size of the loader.
    first = fit_locally(spec.override(["stop.epochs=1.5"]))
    record = shoal.runs.load(first.run_id).spec
    again = fit_locally(TrainSpec.from_record(record, [f"resume={first.run_id}", f"stop.epochs={EPOCHS}"]))
    assert again.metrics["val_loss"] == pytest.approx(result.metrics["val_loss"], rel=1e-5)


def _train(spec: TrainSpec, folder: Path, world: World | None = None) -> dict[str, Tensor]:
    trainer = Trainer(spec, make_task(spec.task, spec.args), world or World.single("cpu"), folder)
    trainer._profiler = None  # it costs more than the steps
    trainer.run()
    return trainer._parts.model.modules[0].state_dict()


@pytest.mark.filterwarnings("ignore")  # of Lightning's own calls
@pytest.mark.parametrize("name", sorted(KINDS.keys() - SUBSUMED))
def test_a_module_of_each_kind_is_trained_as_lightning_does_or_refused_by_name(name: str, tmp_path: Path) -> None:
    fit = partial(_train, folder=tmp_path / "run")
    assert judge(name, tmp_path, 3, fit) == ("refused" if KINDS[name].refused else "equal")


@pytest.mark.parametrize("name", ["Chained", "Averaging", "StopsEarly", "UntoggledGan", "Saving", "TwoSchedules"])
def test_a_resumed_run_of_a_module_goes_on_as_one_that_was_not(name: str, tmp_path: Path) -> None:
    weights = _train(make_spec(name, 3), tmp_path / "once")
    _train(make_spec(name, 3).override(["stop.epochs=1.5"]), tmp_path / "twice")
    resumed = _train(make_spec(name, 3), tmp_path / "twice")
    for key, value in weights.items():
        torch.testing.assert_close(resumed[key], value, rtol=1e-6, atol=1e-7, msg=f"{name}: {key}")


def _train_on_ranks(world: World, folder: Path, names: list[str]) -> dict[str, dict[str, Tensor]]:
    """The program of a rank."""
    plan = ["workers=2", "parallel.data=2"]
    return {name: _train(make_spec(name, 3).override(plan), folder / name, world) for name in names}


def test_modules_on_two_ranks_take_the_steps_of_one_process_and_stop_with_them(tmp_path: Path) -> None:
    names = ["StopsEarly", "StopsItself", "Clipped", "EveryThirdStep", "Logging"]
    ranks = run_ranks(_train_on_ranks, 2, tmp_path / "ranks", names)
    for name in names:
        weights = _train(make_spec(name, 3), tmp_path / name)
        for key, value in weights.items():
            for rank in ranks:
                torch.testing.assert_close(rank[name][key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")


@pytest.mark.parametrize("name", ["Gan", "ZeroesItself"])
def test_a_module_that_takes_its_steps_itself_is_of_one_process(name: str) -> None:
    with pytest.raises(ConfigError, match=r"takes its steps itself .*workers"):
        validate_run(make_spec(name, 3).override(["workers=2", "parallel.data=2"]))


def test_a_module_needs_neither_forward_nor_validation(caplog: pytest.LogCaptureFixture) -> None:
    result = fit_locally(_spec("BareTask", stop={"epochs": 2}))
    assert result.steps == 12
    version = Registry().get("baretask")
    assert "it cannot be served" in caplog.text
    with pytest.raises(ConfigError, match="without inputs, since its module has no `forward`"):
        BatchLayout(version.manifest.signature, ModelOptions())


@pytest.mark.parametrize(("name", "taken"), [("x", ["x"]), ("batch", [])])
def test_a_batch_may_be_a_dict_and_its_entries_are_inputs_if_forward_names_them(name: str, taken: list[str]) -> None:
    body: Any = {"x": lambda self, x: self.net(x), "batch": lambda self, batch: self.net(batch["x"])}[name]
    module = type("Named", (Bare,), {"forward": body})()
    task = type("NamedTask", (LightningTask,), {"module": lambda self: module})()
    batch = {"x": torch.zeros(2, 4), "y": torch.zeros(2, 1)}
    network = task.model()
    assert [each is batch["x"] for each in task.inputs(batch)] == [True] * len(taken)
    assert [each.name for each in infer_signature(task, network, batch).inputs] == taken


def test_a_value_that_one_step_logs_is_that_of_the_next_steps_too() -> None:
    """Else it would count as zero in the means of a record."""
    module, logs = Bare(), Logs(is_training=True)
    for index in range(3):
        with logs.receive(module, 1) as logged:
            if index == 0:
                module.log("rare", 5.0)
            module.log("index", index)
    assert {name: float(value) for name, value in logged.items()} == {"rare": 5.0, "index": 2.0}


def test_an_attribute_of_the_trainer_that_is_not_there_is_named() -> None:
    view = TrainerView()
    with pytest.raises(TrainerAttributeError, match=r"self\.trainer\.accelerator = None: is not there in a run"):
        _ = view.accelerator
    with pytest.raises(ConfigError, match=r"self\.trainer\.max_epochs.*is known from the module"):
        _ = view.max_epochs
    assert not hasattr(view, "tuner")


def test_all_that_lightning_lets_override_is_on_one_list() -> None:
    """A new version of Lightning fails here, with the names that are not judged yet."""
    assert OBEYED & HARMLESS == OBEYED & REFUSED.keys() == HARMLESS & REFUSED.keys() == set()
    kinds = (lightning.LightningModule, lightning.LightningDataModule, lightning.Callback)
    bases = {base for kind in kinds for base in kind.__mro__ if "lightning" in base.__module__}
    there = {name for base in bases for name in vars(base) if not name.startswith("_")}
    assert sorted(there ^ (OBEYED | HARMLESS | REFUSED.keys())) == []


def _configure(returned: Any) -> None:
    class Configured(Bare):
        def configure_optimizers(self) -> Any:
            return returned(torch.optim.SGD(self.parameters(), 0.1))

    class ConfiguredTask(LightningTask):
        def module(self) -> Any:
            return Configured()

    task = ConfiguredTask()
    task.optimizer(task.model().parameters())


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (lambda optimizer: [optimizer, optimizer], "automatic_optimization = False"),
        (lambda optimizer: {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer)}, "monitor"),
    ],
)
def test_optimizers_that_it_cannot_take_are_refused(returned: Any, problem: str) -> None:
    with pytest.raises((RuntimeError, MisconfigurationException), match=problem):
        _configure(returned)


def test_a_schedule_names_the_metric_that_is_missing() -> None:
    class Mistyped(Bare):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_los"}

    events = LightningEvents(TrainerView())
    events.view.lightning_module = Mistyped()
    events.configure_optimizers()
    events.view.update_metrics({"val_loss": 1.0})
    with pytest.raises(ConfigError, match=r"lr_scheduler\.monitor = 'val_los'.*there is val_loss"):
        events._advance("epoch", 1, follows_metric=True)


def test_loaders_of_something_else_are_refused() -> None:
    class Source:
        def __init__(self, train: Any, validation: Any = None) -> None:
            self.train_dataloader, self.val_dataloader = lambda: train, lambda: validation

    class Other(LinesTask):
        def datamodule(self) -> Any:
            return Source(*given)

    loader = DataLoader(_make_points(8, 1))
    given: tuple[Any, ...] = ([1, 2],)
    with pytest.raises(ConfigError, match="train_dataloader': gives 2 loaders"):
        Other().data()
    given = (loader, [loader, loader])
    with pytest.raises(ConfigError, match="val_dataloader': gives 2 loaders"):
        Other().data()
