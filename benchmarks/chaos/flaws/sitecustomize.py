"""A flaw that each Python of a campaign has, by SHOAL_FLAW: what `benchmarks.chaos.flawed` has found by chaos.

forget: a gateway that starts again counts one learnt segment less. lose: what goes on from a checkpoint takes the one
before the newest. mix: the first answers by a version have every second row from elsewhere.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from types import ModuleType


def forget(ledgers: ModuleType) -> None:
    load = ledgers.Ledger._load_accounts

    def load_fewer(self, rows, queued):
        load(self, rows, queued)
        for account in self._accounts.values():
            if account.consumed:
                account.consumed -= 1
                self._totals.consumed -= 1
                return

    ledgers.Ledger._load_accounts = load_fewer


def lose(directory: ModuleType) -> None:
    list_newest = directory.list_newest_first
    directory.list_newest_first = lambda folder: list_newest(folder)[1:] or list_newest(folder)


def mix(predictors: ModuleType) -> None:
    predict, forwards = predictors.LoadedModel._predict, {}

    def predict_mixed(self, rows, num_rows):
        outputs = predict(self, rows, num_rows)
        forwards[self.version] = forwards.get(self.version, 0) + 1
        if len(forwards) > 1 and 5 < forwards[self.version] < 30:
            outputs = {name: array.copy() for name, array in outputs.items()}
            for array in outputs.values():
                array[1::2] += 1
        return outputs

    predictors.LoadedModel._predict = predict_mixed


FLAWS = {
    "forget": ("shoal.rl.experience.segment_ledger", forget),
    "lose": ("shoal.checkpoint.directory", lose),
    "mix": ("shoal.serve.model.predictor", mix),
}


class FlawFinder(MetaPathFinder):
    """Changes a module once it has run."""

    def __init__(self, name, change):
        self._name, self._change = name, change

    def find_spec(self, name, path, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        run = spec.loader.exec_module

        def run_changed(module):
            run(module)
            self._change(module)

        spec.loader.exec_module = run_changed
        return spec


if flaw := os.environ.get("SHOAL_FLAW"):
    sys.meta_path.insert(0, FlawFinder(*FLAWS[flaw]))
