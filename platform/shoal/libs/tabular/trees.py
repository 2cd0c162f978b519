"""What gradient-boosted trees reach on the same split: metrics of the run, for comparison and for nothing else.

Called as a callback of `TableTask`, in the process that writes the record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np

from shoal.extend import ReportPanels
from shoal.extend.train import Callback, TrainingState
from shoal.libs.tabular.dataset import Table

MAX_CATEGORIES = 255  # the most categories that they take
_log = logging.getLogger(__name__)

PANELS = ReportPanels(
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
    """Fits scikit-learn's HistGradientBoosting, at its defaults; logs its score at each evaluation."""

    def __init__(self, get_table: Callable[[], Table]) -> None:
        self._get_table, self._score = get_table, dict[str, float]()

    def on_begin(self, state: TrainingState) -> None:
        if not state.is_first:
            return
        try:
            self._score = score_trees(self._get_table())
        except ImportError:
            _log.warning("gradient-boosted trees are left out of the comparison: pip install scikit-learn")

    def on_evaluation(self, state: TrainingState) -> None:
        if self._score:
            state.log(self._score)


def score_trees(table: Table) -> dict[str, float]:
    """Their accuracy or R² on the validation rows."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    encoders = table.encoders
    is_word = [each.kind == "word" for each in encoders.columns]
    arrays = [_make_features(table, part) for part in ("train", "validation")]
    answers = [encoders.target.encode(table.select(part)[encoders.target.name]) for part in ("train", "validation")]
    kind = HistGradientBoostingClassifier if encoders.target.classes else HistGradientBoostingRegressor
    trees = kind(random_state=0, categorical_features=is_word).fit(arrays[0], answers[0])
    metric = "accuracy" if encoders.target.classes else "r2"
    return {f"validation/{metric}_trees": float(trees.score(arrays[1], answers[1]))}


def _make_features(table: Table, part: str) -> np.ndarray:
    """[B, columns]: numbers as they are, words as their numbers, gaps and words without a number as NaN."""
    values: Mapping[str, np.ndarray] = table.select(part)  # type: ignore[arg-type]
    features = []
    for each in table.encoders.columns:
        if each.kind != "word":
            features.append(values[each.name])
            continue
        codes = each.encode_categories(values[each.name], is_strict=False) - 2.0
        features.append(np.where((codes < 0) | (codes >= MAX_CATEGORIES), np.nan, codes))
    return np.stack(features, 1)
