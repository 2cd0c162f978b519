"""A LightningModule, with its data, as a Task.

    from shoal.libs.lightning.task import LightningTask

    class Digits(LightningTask):
        def module(self):
            return LitDigits(hidden=64)

        def datamodule(self):
            return DigitsData("digits/")

Then `shoal run train task=digits.py:Digits parallel=ddp workers=2`. The module's steps, its hooks and its
`configure_optimizers` are called as Lightning's trainer calls them; what they log is in the run's record. Imports
nothing of Lightning.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.errors import ConfigError
from shoal.extend.data import Data
from shoal.extend.parallel import Loss
from shoal.extend.registry import Signature
from shoal.extend.train import Callback, RunFacts, Task
from shoal.libs.lightning.events import LightningEvents
from shoal.libs.lightning.hooks import check_overridden, is_overridden, read_callbacks
from shoal.libs.lightning.own_steps import takes_own_steps
from shoal.libs.lightning.trainer_view import TrainerView


class LightningTask(Task):
    """Subclass it, and write `module`; and `datamodule` or `data`, if the module has no `train_dataloader` itself.

    Loaders give datasets, samplers, collate functions and batch sizes, as with `shoal.Data`. The model's outputs at an
    endpoint are those of the module's `forward`, if it has one. `optimizer=` of the spec counts where
    `configure_optimizers` gives none; a schedule of the module's needs `schedule.name=constant`, the default.

    As with every step of a Task's own, each rank has the full model. A module that takes its steps itself (manual
    optimization, an `optimizer_step` of its own) is trained in one process. Raises ConfigError for what `hooks` says is
    refused.
    """

    _loop: LightningEvents | None = None
    _entries: frozenset[str] = frozenset()  # of a batch that is a dict

    @property
    def _events(self) -> LightningEvents:
        if self._loop is None:
            self._loop = LightningEvents(TrainerView())
        return self._loop

    def module(self) -> Any:
        """The LightningModule, with fresh weights."""
        raise NotImplementedError(f"{type(self).__name__}.module")

    def datamodule(self) -> Any:
        """A LightningDataModule; or anything with `train_dataloader`, and perhaps `val_dataloader`: by default the
        module."""
        return self.module()

    def setup(self, run: RunFacts) -> None:
        self._events.view.run = run

    def model(self) -> nn.Module:
        network: Any = self.module()
        check_overridden(network)
        events, view = self._events, self._events.view
        network.trainer, view.lightning_module = view, network
        if view.run is not None:
            view.callbacks = read_callbacks(network)
            events.takes_own_steps = takes_own_steps(network, view.run)
            if view.datamodule is not None and is_overridden(network, "prepare_data"):
                network.prepare_data()
            events.call("setup", "fit")
        if is_overridden(network, "configure_model"):
            network.configure_model()
        built: nn.Module = network
        return built

    def data(self) -> Data:
        source, view = self.datamodule(), self._events.view
        source.trainer = view
        for name, args in (("prepare_data", ()), ("setup", ("fit",))):
            getattr(source, name, lambda *_: None)(*args)
        view.train_dataloader = _require_loader(source.train_dataloader(), "train_dataloader")
        found = source.val_dataloader() if is_overridden(source, "val_dataloader") else None
        view.val_dataloaders = _require_loader(found, "val_dataloader") if found else None
        view.datamodule = source if type(self).datamodule is not LightningTask.datamodule else None
        return Data(view.train_dataloader, view.val_dataloaders)

    def train_step(self, model: nn.Module, batch: Any) -> Any:
        """The loss of `training_step`, and what it logs; or the steps that the module takes itself."""
        return self._events.train_step(model, batch)

    def eval_step(self, model: nn.Module, batch: Any) -> dict[str, Loss]:
        """What `validation_step` logs; a returned tensor is `val_loss`."""
        return self._events.eval_step(model, batch)

    def finish_evaluation(self) -> Mapping[str, float]:
        return self._events.finish_evaluation()

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer] | None:
        """Those of a module that takes its steps itself."""
        events = self._events
        if not events.takes_own_steps:
            return None
        return {f"optimizer_{index}": each for index, each in enumerate(events.configure_optimizers())}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
        return next(iter(self._events.configure_optimizers()), None)

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Of a dict, what `forward` names; else as of any Task."""
        if not isinstance(batch, Mapping) or "inputs" in batch:
            return super().inputs(batch)
        self._entries = frozenset(batch)
        module = self._events.module
        names = [] if module is None else [*inspect.signature(module.forward).parameters]
        return tuple(batch[name] for name in names if name in batch)

    def signature(self) -> Signature | None:
        """None, as of any Task; without inputs, so that there is nothing to serve, for a module that has no `forward`,
        or one that names nothing of a batch that is a dict."""
        module = self._events.module
        named = self._entries & inspect.signature(module.forward).parameters.keys()
        has_inputs = is_overridden(module, "forward") and bool(named or not self._entries)
        return None if has_inputs else Signature(inputs=[], outputs=[])

    def callbacks(self) -> Sequence[Callback]:
        return [self._events]


def _require_loader(loader: Any, name: str) -> DataLoader[Any]:
    if isinstance(loader, (list, tuple)) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        many = f"{len(loader)} loaders" if isinstance(loader, (list, tuple)) else f"a {type(loader).__name__}"
        raise ConfigError("datamodule", name, f"gives {many}", "give a torch DataLoader, or write Task.data()")
    return loader
