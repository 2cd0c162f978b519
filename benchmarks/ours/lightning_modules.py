"""LightningModules of many kinds, as people write them, and each trained by a run of Shoal and by Lightning's Trainer.

Called by `benchmarks.lightning_modules` and by `tests/libs/lightning`. A module notes the rates and the loss of each
step, and what its hooks see, in `seen`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning import callbacks as lightning_callbacks
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import LBFGS, SGD, Adam, AdamW, lr_scheduler
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from shoal.errors import ShoalError
from shoal.libs.lightning.task import LightningTask
from shoal.train import TrainSpec

TOLERANCE = 1e-4  # sums are taken in another order
created: list[Net] = []


def make_rows(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1).sin() > 0).long())


class Net(pl.LightningModule):
    """A classifier, trained with SGD. Its kinds change a thing or two.

    fields, of_trainer: what a run of Shoal is given, and Lightning's Trainer for the same
    refused:            a word of the message, where a run refuses it
    """

    fields: ClassVar[dict[str, Any]] = {}
    of_trainer: ClassVar[dict[str, Any]] = {}
    refused: ClassVar[str] = ""
    rows, batch_size = 101, 16

    def __init__(self, divided: int = 1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
        self.seen: list[Any] = []
        self.size = self.batch_size // divided
        created.append(self)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def measure(self, batch: Any) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        if self.training:  # not the check of a run that splits its batches
            self.note(loss)
        return loss

    def note(self, *values: Any) -> None:
        rates = [group["lr"] for each in self.trainer.optimizers for group in each.param_groups]
        self.seen.append([*rates, *(float(torch.as_tensor(each).detach()) for each in values)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.measure(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(make_rows(self.rows, 1), batch_size=self.size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(make_rows(40, 2), batch_size=16)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.2)


KINDS: dict[str, type[Net]] = {}


def kind(module: type[Net]) -> type[Net]:
    KINDS[module.__name__] = module
    return module


def with_schedule(name: str, make: Callable[[Any], Any], **options: Any) -> None:
    """A kind with a schedule: `make` gives it for the optimizer."""

    def configure_optimizers(self: Net) -> Any:
        optimizer = SGD(self.parameters(), lr=0.2, momentum=0.8)
        self.schedule = {"scheduler": make(optimizer), **options}
        return {"optimizer": optimizer, "lr_scheduler": self.schedule}

    kind(type(name, (Net,), {"configure_optimizers": configure_optimizers}))


kind(Net)
with_schedule("StepEachEpoch", lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
with_schedule("EverySecondEpoch", lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5), frequency=2)
with_schedule("OneCycle", lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=28), interval="step")
with_schedule(
    "EveryThirdStep", lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9), interval="step", frequency=3
)
with_schedule("Restarts", lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5), interval="step")
with_schedule(
    "Milestones", lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 9, 20], gamma=0.3), interval="step"
)
with_schedule(
    "Chained",
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        milestones=[6],
    ),
    interval="step",
)
with_schedule(
    "Plateau",
    lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3),
    monitor="val_loss",
)


@kind
class PlateauOfSteps(Net):
    """Follows a value that each step logs, two steps at a time."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.measure(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.2)
        follows = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
        chosen = {"scheduler": follows, "monitor": "train_loss", "interval": "step", "frequency": 2}
        return [optimizer], [chosen]


@kind
class PlateauOfEpochMeans(PlateauOfSteps):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.measure(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.2)
        follows = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": follows, "monitor": "train_loss_epoch"}


@kind
class TwoSchedules(Net):
    """A warm-up by step, and a plateau by epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.4)
        warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
        return [optimizer], [
            {"scheduler": warm_up, "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


@kind
class OwnSchedulerStep(Net):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.2)
        return [optimizer], [{"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.global_step % 2:
            scheduler.step()


@kind
class ParameterGroups(Net):
    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [each for each in self.parameters() if each.ndim > 1], "weight_decay": 0.1},
            {"params": [each for each in self.parameters() if each.ndim == 1], "lr": 0.05},
        ]
        return AdamW(groups, lr=0.02)


@kind
class BatchNormalised(Net):
    def __init__(self, divided: int = 1) -> None:
        super().__init__(divided)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))


@kind
class WithoutValidation(Net):
    validation_step = pl.LightningModule.validation_step
    val_dataloader = pl.LightningModule.val_dataloader

    def on_train_epoch_end(self) -> None:
        self.note(self.current_epoch, self.global_step)


@kind
class Clipped(Net):
    """Its hooks see the gradients before they are clipped, and change them."""

    fields: ClassVar[dict[str, Any]] = {"clip_norm": 0.2}
    of_trainer: ClassVar[dict[str, Any]] = {"gradient_clip_val": 0.2}

    def on_after_backward(self) -> None:
        for each in self.parameters():
            each.grad *= 1.5

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note(sum(each.grad.norm() for each in self.parameters()))


@kind
class ClipsItself(Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")


@kind
class ClipsAfterWarmUp(Net):
    fields: ClassVar[dict[str, Any]] = {"clip_norm": 0.1}
    of_trainer: ClassVar[dict[str, Any]] = {"gradient_clip_val": 0.1}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.global_step > 5:
            self.clip_gradients(
                optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
            )


@kind
class Accumulating(Net):
    """Batches of a run are divided, Lightning's are added up. Its hooks are called as often."""

    rows = 96
    fields: ClassVar[dict[str, Any]] = {"parallel": {"accumulate": 2}}
    of_trainer: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2}

    total = 0.0

    def measure(self, batch: Any) -> Tensor:  # a run's parts of a batch are of other rows, with the same mean
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.total += float(loss.detach()) if self.training else 0.0
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note(batch_idx, len(batch[0]))

    def on_after_backward(self) -> None:
        self.note(2)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note(self.total)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(batch_idx, self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.2)
        return [optimizer], [
            {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step", "frequency": 4}
        ]


class Manual(Net):
    def __init__(self, divided: int = 1) -> None:
        super().__init__(divided)
        self.automatic_optimization = False


@kind
class ManualOne(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.measure(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(outputs["loss"], self.global_step)


@kind
class ManualAccumulating(Manual):
    """Adds up the gradients of three batches, and clips them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(self.measure(batch) / 3)
        if (batch_idx + 1) % 3 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


@kind
class ManualScheduled(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=True)
        optimizer.zero_grad()
        self.manual_backward(self.measure(batch))
        optimizer.step()
        if batch_idx == 6:  # the last one
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.05)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]


@kind
class ManualPlateau(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.measure(batch))
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step(self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.2)
        return [optimizer], [lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)]


@kind
class ManualClosure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def compute() -> Tensor:
            optimizer.zero_grad()
            loss = self.measure(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=compute)


@kind
class ManualTwice(Manual):
    """Two steps of a batch, of which the second is of a perturbed input, and a graph that is kept."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        inputs, labels = batch[0].clone().requires_grad_(), batch[1]
        loss = self.measure((inputs, labels))
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        self.manual_backward(self.measure((inputs.detach() + 0.1 * inputs.grad.sign(), labels)))
        optimizer.step()


class Adversarial(Manual):
    """A generator and a discriminator."""

    def __init__(self, divided: int = 1) -> None:
        super().__init__(divided)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def score(self, points: Tensor, target: float) -> Tensor:
        logits = self.judge(points)
        loss = functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))
        self.note(loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.judge(self.net(batch[0])).mean())

    def configure_optimizers(self) -> Any:
        return [Adam(self.net.parameters(), lr=0.02), SGD(self.judge.parameters(), lr=0.1)], []


@kind
class Gan(Adversarial):
    """Lightning's own example: toggles, steps, zeroes, untoggles."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator, discriminator = self.optimizers()
        noise = batch[0].flip(0)
        self.toggle_optimizer(generator)
        loss = self.score(self.net(noise), 1.0)
        self.log("g_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(discriminator)
        loss = (self.score(batch[0], 1.0) + self.score(self.net(noise).detach(), 0.0)) / 2
        self.log("d_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        discriminator.step()
        discriminator.zero_grad()
        self.untoggle_optimizer(discriminator)


@kind
class UntoggledGan(Adversarial):
    """Its losses leave gradients in both networks; with schedules of both."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator, discriminator = self.optimizers()
        noise = batch[0].flip(0)
        self.manual_backward(self.score(self.net(noise), 1.0))
        generator.step()
        if batch_idx % 2:
            self.manual_backward(self.score(batch[0], 1.0) + self.score(self.net(noise).detach(), 0.0))
            discriminator.step()
            discriminator.zero_grad()
        generator.zero_grad()
        for each in self.lr_schedulers():
            each.step()

    def configure_optimizers(self) -> Any:
        both, _ = super().configure_optimizers()
        return [{"optimizer": each, "lr_scheduler": lr_scheduler.ExponentialLR(each, 0.95)} for each in both]


@kind
class Wasserstein(Adversarial):
    """Clamps weights in a hook, and trains by `toggle_model` and `toggled_optimizer`."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note(len(optimizer.param_groups[0]["params"]), self.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for each in self.judge.parameters():
                each.clamp_(-0.2, 0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator, discriminator = self.optimizers()
        with discriminator.toggle_model():
            loss = self.judge(self.net(batch[0].flip(0)).detach()).mean() - self.judge(batch[0]).mean()
            self.note(loss)
            discriminator.zero_grad()
            self.manual_backward(loss)
            discriminator.step()
        if batch_idx % 3 == 0:
            with self.toggled_optimizer(generator):
                loss = -self.judge(self.net(batch[0].flip(0))).mean()
                self.note(loss)
                generator.zero_grad()
                self.manual_backward(loss)
                generator.step()


@kind
class WarmsUpByHand(Net):
    """An optimizer_step of its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * min(1.0, (self.trainer.global_step + 1) / 10)


@kind
class StepsEverySecondTime(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


@kind
class ZeroesItself(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2:
            optimizer.zero_grad()


@kind
class ZeroesToNone(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)


@kind
class BackwardTwice(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        (0.1 * loss).backward()


@kind
class SetsRates(Net):
    """`self.optimizers()` for reading and setting."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        group = self.optimizers().param_groups[0]
        group["lr"] = 0.9 * group["lr"]


@kind
class ReadsSchedules(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(self.lr_schedulers().get_last_lr()[0], outputs["loss"])

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.2)
        return [optimizer], [{"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


@kind
class ClampsWeights(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for each in self.parameters():
                each.clamp_(-0.3, 0.3)


@kind
class SeesOldGradients(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note(sum(each.grad.norm() for each in self.parameters() if each.grad is not None))


@kind
class AddsNoise(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(self.global_step)
        for each in self.parameters():
            each.grad += 0.05 * torch.randn(each.shape, generator=generator)


@kind
class AveragesByHand(Net):
    """An average of its own, as a target network."""

    def __init__(self, divided: int = 1) -> None:
        super().__init__(divided)
        self.target = nn.Linear(12, 2).requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            soft = self.target(self.net[:2](batch[0])).softmax(1)
        return self.measure(batch) + functional.kl_div(self(batch[0]).log_softmax(1), soft, reduction="batchmean")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for mine, own in zip(self.target.parameters(), self.net[2].parameters(), strict=True):
                mine.lerp_(own, 0.2)


@kind
class Everything(Net):
    """Notes each hook, with what it knows of the run."""

    def on_validation_epoch_end(self) -> None:
        self.log("from_epoch_end", 0.5 + self.current_epoch)


def _note_hook(name: str, number: int) -> Callable[..., None]:
    def note(self: Everything, *args: Any, **options: Any) -> None:
        if name == "setup":
            self.seen.clear()  # the loaders' own in a run
        self.seen.append([float(number), float(self.current_epoch), float(self.global_step)])
        if "validation" not in name and name not in ("setup", "teardown", "on_fit_end", "on_fit_start", "on_train_end"):
            self.log(name, float(number))

    return note


_OF_A_FIT = """
    setup teardown on_fit_start on_fit_end on_train_start on_train_end on_train_epoch_start on_train_epoch_end
    on_train_batch_start on_train_batch_end on_before_backward on_after_backward on_before_optimizer_step
    on_validation_start on_validation_end on_validation_epoch_start on_validation_batch_start on_validation_batch_end
    """
for number, name in enumerate(_OF_A_FIT.split()):
    setattr(Everything, name, _note_hook(name, number))
kind(Everything)


@kind
class Logging(Net):
    """`self.log` in all forms; what it finds of them sets the rate."""

    def __init__(self, divided: int = 1) -> None:
        super().__init__(divided)
        self.save_hyperparameters()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.metrics = torchmetrics.MetricCollection({"recall": torchmetrics.Recall("multiclass", num_classes=2)})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.measure(batch)
        self.accuracy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train_accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("late", loss * 2, on_step=False, on_epoch=True, batch_size=batch_idx + 1)
        self.log_dict({"a": 1.0, "b": batch_idx}, logger=False)
        return {"loss": loss, "logits": self(batch[0]).detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(outputs["logits"].sum(), self.trainer.callback_metrics["train_loss"])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.metrics.update(logits, batch[1])
        self.log("val_loss", functional.cross_entropy(logits, batch[1]))
        self.log("val_weighted", logits.mean(), batch_size=1 + batch_idx)
        self.log_dict(self.metrics)
        return logits

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_logits", outputs.mean())

    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics
        names = ("train_loss", "train_loss_epoch", "train_accuracy", "late", "val_loss", "val_weighted", "recall")
        self.note(*(found[name].item() for name in (*names, "val_logits")))
        self.optimizers().param_groups[0]["lr"] = 0.1 + 0.1 * found["train_accuracy"].item()


@kind
class RatesByValidation(Net):
    def on_validation_epoch_end(self) -> None:
        self.log("doubled", 2 * self.trainer.callback_metrics.get("val_loss", torch.tensor(1.0)))

    def on_train_epoch_end(self) -> None:
        self.note(self.trainer.callback_metrics["val_loss"])
        for group in self.optimizers().param_groups:
            group["lr"] = 0.3 * self.trainer.callback_metrics["val_loss"].item()


@kind
class Configured(Net):
    """Layers of configure_model, and rows of setup."""

    def __init__(self, divided: int = 1) -> None:
        super().__init__(divided)
        del self.net
        self.prepared = 0

    def prepare_data(self) -> None:
        self.prepared += 1

    def setup(self, stage: str) -> None:
        self.scale = 2.0 if stage == "fit" and self.prepared else 3.0

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(6)
            self.net = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(self.scale * inputs)


class Rows(pl.LightningDataModule):
    def __init__(self, divided: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.rows = make_rows(90, 7)

    def train_dataloader(self) -> DataLoader[Any]:
        weights, generator = torch.arange(1.0, 91.0).tolist(), torch.Generator().manual_seed(3)
        return DataLoader(self.rows, 20, sampler=WeightedRandomSampler(weights, 90, generator=generator))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(make_rows(33, 8), batch_size=10)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 1.5, batch[1]


@kind
class OfDataModule(Net):
    """Both have hooks of batches: the data module's go before."""

    data_kind = Rows

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 100.0, batch[1]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] - 0.1, batch[1]


@kind
class Transfers(Net):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [each.to(device) for each in (batch[0].tanh(), batch[1])]


@kind
class StopsEarly(Net):
    def configure_callbacks(self) -> Any:
        return [lightning_callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=1)]


@kind
class StopsByTrainingLoss(PlateauOfEpochMeans):
    def configure_callbacks(self) -> Any:
        early = lightning_callbacks.EarlyStopping("mean", patience=1, min_delta=0.2)
        return [lightning_callbacks.ModelSummary(), early]

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.trainer.callback_metrics["train_loss"] * 2)


@kind
class StopsItself(Net):
    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = self.current_epoch == 1


@kind
class StopsWithin(WithoutValidation):
    """In the middle of an epoch, whose end it hears of."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 10:
            self.trainer.should_stop = True


@kind
class EndsAtStep(Net):
    fields: ClassVar[dict[str, Any]] = {"stop": {"steps": 17}}
    of_trainer: ClassVar[dict[str, Any]] = {"max_epochs": -1, "max_steps": 17}

    def on_train_epoch_end(self) -> None:
        self.note(self.current_epoch, self.global_step)


@kind
class Averaging(Net):
    def configure_callbacks(self) -> Any:
        return lightning_callbacks.EMAWeightAveraging(decay=0.9)

    def on_train_epoch_end(self) -> None:
        self.note(self.trainer.callback_metrics["val_loss"])


@kind
class AveragingLate(Net):
    """Stochastic weight averaging, by Lightning's newer callback."""

    def configure_callbacks(self) -> Any:
        class Late(lightning_callbacks.WeightAveraging):
            def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
                return epoch_idx is not None and epoch_idx >= 1

        return Late(avg_fn=get_ema_avg_fn(0.5))


@kind
class WithCallbacks(Net):
    """Callbacks of its own, before the module's hooks."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note(self.net[0].weight.grad.norm())

    def configure_callbacks(self) -> Any:
        class Freezes(pl.Callback):
            def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
                pl_module.net[0].weight.grad *= 0.1

            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                trainer.optimizers[0].param_groups[0]["lr"] /= 2

        def shrink(trainer: Any, module: Any, *_: Any) -> None:
            with torch.no_grad():
                module.net[2].bias *= 0.5

        return [Freezes(), lightning_callbacks.LambdaCallback(on_train_batch_end=shrink)]


@kind
class Saving(Net):
    """Hooks of checkpoints, and a counter that they hold."""

    def __init__(self, divided: int = 1) -> None:
        super().__init__(divided)
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return self.measure(batch) * (1 + 0.1 * (self.count % 3))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["count"]


# -- refused, by name


@kind
class EndsEpochEarly(Net):
    refused = "on_train_batch_start"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


@kind
class SkipsBatches(Net):
    refused = "training_step gave a NoneType"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.measure(batch) if batch_idx % 2 else None


@kind
class SeveralAutomatic(Net):
    """Lightning refuses it, too."""

    refused = "automatic_optimization = False"

    def configure_optimizers(self) -> Any:
        return [SGD(self.net[0].parameters(), 0.1), SGD(self.net[2].parameters(), 0.1)]


@kind
class LogsTheGreatest(Net):
    refused = "reduce_fx"

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self(batch[0]).max(), reduce_fx="max")


@kind
class LogsByAnotherName(Net):
    refused = "has a log of its own"

    def log(self, name: str, *args: Any, **options: Any) -> None:
        super().log(f"mine/{name}", *args, **options)


@kind
class ManualAndClipped(ManualOne):
    """Lightning refuses it, too."""

    refused = "clip_norm"
    fields: ClassVar[dict[str, Any]] = {"clip_norm": 0.1}


@kind
class ManualAndAccumulating(ManualOne):
    """Lightning refuses it, too."""

    refused = "accumulate"
    fields: ClassVar[dict[str, Any]] = {"parallel": {"accumulate": 2}}


@kind
class ManualLbfgs(ManualClosure):
    refused = "an optimiser whose step needs no closure"

    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters(), lr=0.1, max_iter=3)


@kind
class ValidatedInTrainingMode(Net):
    refused = "on_validation_model_eval"

    def on_validation_model_eval(self) -> None:
        """Stays in training mode."""


@kind
class SwapsWeights(Net):
    refused = "StochasticWeightAveraging"

    def configure_callbacks(self) -> Any:
        return lightning_callbacks.StochasticWeightAveraging(0.1)


@kind
class SavesTheBest(Net):
    refused = "ModelCheckpoint"

    def configure_callbacks(self) -> Any:
        return [lightning_callbacks.ModelCheckpoint(monitor="val_loss")]


class ModuleTask(LightningTask):
    def __init__(self, *, kind: str) -> None:
        self.kind = kind

    def module(self) -> Net:
        return KINDS[self.kind]()

    def datamodule(self) -> Any:
        data_kind = getattr(KINDS[self.kind], "data_kind", None)
        return super().datamodule() if data_kind is None else data_kind()


def fit_with_lightning(name: str, folder: Path, epochs: int) -> Net:
    """The module after Lightning's Trainer has fitted it."""
    found = KINDS[name]
    options = {"max_epochs": epochs, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"num_sanity_val_steps": 0, "enable_model_summary": False, "accelerator": "cpu", **found.of_trainer}
    module = found(options.get("accumulate_grad_batches", 1))
    data_kind = getattr(found, "data_kind", None)
    with warnings.catch_warnings(action="ignore"):
        pl.Trainer(default_root_dir=folder, **options).fit(
            module, datamodule=None if data_kind is None else data_kind()
        )
    return module


def make_spec(name: str, epochs: int) -> TrainSpec:
    values = {"stop": {"epochs": epochs}, "args": {"kind": name}, "device": "cpu", "loader": {"shuffle": False}}
    return TrainSpec.parse({"task": f"{__name__}:ModuleTask", **values, **KINDS[name].fields})


def judge(name: str, folder: Path, epochs: int, fit: Callable[[TrainSpec], Mapping[str, Tensor]]) -> str:
    """`equal`, `refused`, or how a run of Shoal differs from Lightning's.

    fit: the run; returns the weights at its end
    """
    created.clear()
    try:
        weights = fit(make_spec(name, epochs))
    except (ShoalError, RuntimeError) as error:
        is_named = KINDS[name].refused and KINDS[name].refused in str(error)
        return "refused" if is_named else f"refused otherwise: {error}"
    if KINDS[name].refused:
        return "passed over"
    ours = max(created, key=lambda each: len(each.seen))  # others are of checks
    theirs = fit_with_lightning(name, folder, epochs)
    for step, (one, other) in enumerate(zip_longest(ours.seen, theirs.seen, fillvalue=[])):
        if len(one) != len(other) or not torch.allclose(torch.tensor(one), torch.tensor(other), TOLERANCE, TOLERANCE):
            return f"differs at entry {step} of {len(theirs.seen)}: {one}, Lightning {other}"
    for key, own in theirs.state_dict().items():
        if not torch.allclose(weights[key], own, TOLERANCE, TOLERANCE):
            return f"differs in {key} by {float((weights[key] - own).norm() / own.norm()):.2g}"
    return "equal"
