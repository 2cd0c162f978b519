"""What gradient-boosted trees reach on the same split: metrics of the run, for comparison and for nothing else.

Called as a callback of `TableTask`, in the process that writes the record.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np

from shoal.extend import RunPanels
from shoal.extend.train import Callback, TrainingState
from shoal.libs.tabular.dataset import Part, Table

MAX_CATEGORIES = 255  # the most categories that they take
MAX_ROWS = 100_000
LIMIT_S = 60.0
POLL_S = 0.1
_log = logging.getLogger(__name__)

PANELS = RunPanels(
    titles={
        "validation/accuracy_trees": "Accuracy of gradient-boosted trees on the same rows",
        "validation/r2_trees": "R² of gradient-boosted trees on the same rows",
    },
    cards={
        "validation/accuracy_trees": "accuracy of gradient-boosted trees",
        "validation/r2_trees": "R² of gradient-boosted trees",
    },
)


class TreesPeer(Callback):
    """Fits scikit-learn's HistGradientBoosting, at its defaults, after the last step; logs its score."""

    def __init__(self, get_table: Callable[[], Table]) -> None:
        self._get_table = get_table

    def on_end(self, state: TrainingState) -> None:
        if state.is_first and not state.should_stop():
            state.log(score_trees(self._get_table(), state.should_stop))


def score_trees(table: Table, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """Their accuracy or R² on the validation rows; {} where they are not done after LIMIT_S, or are to stop.

    A process of their own fits them, to MAX_ROWS training rows: scikit-learn hears no signal.
    """
    encoders = table.encoders
    arrays: dict[str, Any] = {"is_word": [each.kind == "word" for each in encoders.columns]}
    for part in get_args(Part):
        answers = encoders.target.encode(table.select(part)[encoders.target.name])
        chosen = np.random.default_rng(0).permutation(len(answers))[:MAX_ROWS]
        arrays |= {part: _make_features(table, part)[chosen], f"{part}_y": answers[chosen]}
    kind, metric = ("Classifier", "accuracy") if encoders.target.classes else ("Regressor", "r2")
    with TemporaryDirectory() as folder:
        file, output = Path(folder) / "rows.npz", Path(folder) / "output"
        np.savez(file, **arrays)
        with output.open("wb") as opened:
            command = [sys.executable, "-m", "shoal.libs.tabular", str(file), f"HistGradientBoosting{kind}"]
            child = subprocess.Popen(command, stdout=opened, stderr=subprocess.STDOUT)
        begun_s = time.monotonic()
        try:
            while child.poll() is None and not should_stop() and time.monotonic() - begun_s < LIMIT_S:
                time.sleep(POLL_S)
        finally:
            child.kill()
            status = child.wait()
        *_, last = ["", *output.read_text(errors="replace").splitlines()]
    if status:
        why = last or f"ended after {time.monotonic() - begun_s:.0f} s"
        _log.warning("gradient-boosted trees are left out of the comparison: %s", why)
        return {}
    return {f"validation/{metric}_trees": float(last)}


def _make_features(table: Table, part: Part) -> np.ndarray:
    """[B, columns]: numbers as they are, words as their numbers, gaps and words without a number as NaN."""
    values: Mapping[str, np.ndarray] = table.select(part)
    features = []
    for each in table.encoders.columns:
        if each.kind != "word":
            features.append(values[each.name])
            continue
        codes = each.encode_categories(values[each.name], is_strict=False) - 2.0
        features.append(np.where((codes < 0) | (codes >= MAX_CATEGORIES), np.nan, codes))
    return np.stack(features, 1)
