"""LightningModules of many kinds, each trained by a run and by Lightning's Trainer: equal, or refused by name.

    python -m benchmarks.lightning_modules [--quick]

Compared are the rates and the loss of each step, what hooks see, and the weights that the registry holds at the end.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

import shoal
from benchmarks.children import scratch
from benchmarks.ours.lightning_modules import KINDS, judge
from benchmarks.result import compare, options, write
from shoal.train import TrainSpec
from shoal.train.launch.local import fit_locally
from shoal.weights.tensor_files import read_tensors

EPOCHS = 4
REQUIRED = 40


def fit(spec: TrainSpec) -> Mapping[str, Tensor]:
    """The weights that the registry holds of a run."""
    model = fit_locally(spec.update({"name": "module"})).model
    assert model is not None
    return read_tensors(shoal.Registry().get("module").weight_file())


def main() -> None:
    chosen = options(__doc__, runs=1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    verdicts: dict[str, list[str]] = defaultdict(list)
    for name in list(KINDS)[:: 10 if chosen.quick else 1]:
        with scratch() as folder:
            verdict = judge(name, Path(folder), EPOCHS, fit)
        print(name, verdict, flush=True)
        verdicts[verdict if verdict in ("equal", "refused") else "other"].append(name)
    counts = {title: [float(len(verdicts[title]))] for title in ("equal", "refused", "other")}
    kept = [counts["equal"][0] + counts["refused"][0]]
    notes = {title: ", ".join(names) for title, names in verdicts.items()}
    title = f"of {len(KINDS)} modules, equal to Lightning's Trainer or refused by name"
    rows = [
        compare(title, "", "higher", kept, bar=REQUIRED, bar_kind="value"),
        compare("equal, step by step", "", "higher", counts["equal"], note=notes.get("equal", "")),
        compare("refused by name", "", "lower", counts["refused"], note=notes.get("refused", "")),
        compare("passed over", "", "lower", counts["other"], bar=0.0, bar_kind="value", note=notes.get("other", "")),
    ]
    write("lightning_modules", rows, chosen.results)


if __name__ == "__main__":
    main()
