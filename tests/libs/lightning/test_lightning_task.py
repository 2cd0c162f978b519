"""A LightningModule as a Task takes the steps that Lightning's own trainer takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import shoal.runs
from shoal.errors import ConfigError
from shoal.libs.lightning.task import LightningTask
from shoal.registry import Registry
from shoal.train import TrainSpec
from shoal.train.launch.local import fit_locally
from shoal.weights.tensor_files import read_tensors

lightning = pytest.importorskip("pytorch_lightning")
NUM_SAMPLES, BATCH, EPOCHS = 48, 8, 3


class Lines(lightning.LightningModule):  # type: ignore[misc]
    """A regression that logs, with a schedule by epoch."""

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        self.form = form
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_error", loss.sqrt(), prog_bar=True)
        return {"loss": loss} if self.form == "dict" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log_dict({"val_loss": nn.functional.mse_loss(self(x), y)})

    def configure_optimizers(self) -> Any:
        optimizer: Optimizer = torch.optim.Adam(self.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        match self.form:
            case "dict":
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}
            case "lists":
                return [optimizer], [schedule]
            case "two":
                return [optimizer, torch.optim.SGD(self.parameters(), 0.1)]
            case "plateau":
                return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}
        return optimizer


class Points(lightning.LightningDataModule):  # type: ignore[misc]
    def setup(self, stage: str) -> None:
        x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        self.points = TensorDataset(x, x.sum(1, keepdim=True).sin())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.points, batch_size=BATCH)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.points, batch_size=BATCH)


class LinesTask(LightningTask):
    def __init__(self, *, form: str = "dict") -> None:
        self.form = form

    def module(self) -> Lines:
        return Lines(self.form)

    def datamodule(self) -> Points:
        return Points()


def _spec(form: str, **fields: Any) -> TrainSpec:
    task = f"{LinesTask.__module__}:LinesTask"
    return TrainSpec(
        task=task, args={"form": form}, batch_size=BATCH, stop={"epochs": EPOCHS}, loader={"shuffle": False}, **fields
    )


@pytest.mark.filterwarnings("ignore")  # of Lightning's own calls
@pytest.mark.parametrize("form", ["dict", "lists", "one"])
def test_it_trains_as_lightnings_trainer_does(form: str, tmp_path: Path) -> None:
    result = fit_locally(_spec(form, seed=7, device="cpu"))
    torch.manual_seed(7)
    module = Lines(form)
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=EPOCHS, default_root_dir=tmp_path, enable_model_summary=False, **silent)
    trainer.fit(module, datamodule=Points())
    assert result.metrics["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-5)
    weights = read_tensors(Registry().get("linestask").weight_file())
    for name, expected in module.state_dict().items():
        torch.testing.assert_close(weights[name], expected, msg=name)
    whole = shoal.runs.load(result.run_id).metrics()
    assert "train/train_error" in whole.columns
    if form == "dict":  # a resumed run goes on with its schedule
        first = fit_locally(_spec(form, seed=7, device="cpu").override(["stop.epochs=2"]))
        again = fit_locally(_spec(form, seed=7, device="cpu").override([f"resume={first.run_id}"]))
        rates = [each["train/learning_rate"].iloc[-1] for each in (shoal.runs.load(again.run_id).metrics(), whole)]
        assert rates[0] == pytest.approx(rates[1])
        assert again.metrics["val_loss"] == pytest.approx(result.metrics["val_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("form", "problem"), [("two", "gave 2 optimizers"), ("plateau", "its scheduler follows a metric")]
)
def test_what_it_cannot_do_is_refused(form: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        fit_locally(_spec(form))


def test_a_loader_of_something_else_is_refused() -> None:
    class Other(LinesTask):
        def datamodule(self) -> Any:
            class Source:
                def train_dataloader(self) -> list[int]:
                    return [1, 2]

            return Source()

    with pytest.raises(ConfigError, match="gives a list"):
        Other().data()
