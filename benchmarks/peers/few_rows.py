"""Real small tables, and the peers of `benchmarks.few_rows` on them, in the environment .venv-fewrows.

    python -m benchmarks.peers.few_rows FOLDER SEED NUM_SETS

Writes the sets that the seed draws, and the three sets with classes, to FOLDER/sets.npz and says their names. Then for
each command (set, n, repeat) it fits every peer to the same rows, one thread, and says each one's error and time; for a
set with classes the log loss and accuracy of each classifier.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from benchmarks.talk import commands, say

MIN_ROWS, MAX_TEST_ROWS, MAX_FEATURES, MAX_PER_SOURCE = 30, 50, 10, 3
STATSMODELS = (
    *("anes96", "cancer", "ccard", "copper", "elnino", "engel", "fair", "grunfeld", "heart", "macrodata"),
    *("modechoice", "nile", "randhie", "scotland", "spector", "star98", "statecrime", "strikes", "sunspots"),
)
SKLEARN = ("diabetes", "wine", "breast_cancer", "digits", "iris")


def read_sources() -> dict[str, tuple[list[str], np.ndarray]]:
    """Columns' names and rows float64 [N, columns] of each table: its numbers, without rows that have gaps."""
    import statsmodels.datasets
    from sklearn import datasets

    found = {}
    for name in SKLEARN:
        loaded = getattr(datasets, f"load_{name}")()
        names = [str(each) for each in loaded.feature_names]
        rows = np.asarray(loaded.data, float)
        if name == "diabetes":  # its target is a quantity, those of the others are classes
            names, rows = [*names, "progression"], np.column_stack([rows, loaded.target])
        found[f"sklearn/{name}"] = (names, rows)
    for name in STATSMODELS:
        frame = getattr(statsmodels.datasets, name).load_pandas().data.select_dtypes("number").dropna()
        found[f"statsmodels/{name}"] = ([str(each) for each in frame.columns], frame.to_numpy(float))
    return {
        name: (names, rows) for name, (names, rows) in found.items() if len(rows) >= MIN_ROWS and rows.shape[1] >= 2
    }


def draw_sets(seed: int, num_sets: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Name, features [N, D] and target [N]: a target with at least five values, up to ten other columns of its table.

    At most MAX_PER_SOURCE sets come from one table, with other targets.
    """
    random = np.random.default_rng(seed)
    candidates = []
    for source, (names, rows) in read_sources().items():
        targets = [column for column in range(len(names)) if len(np.unique(rows[:, column])) >= 5]
        for target in random.permutation(targets)[:MAX_PER_SOURCE].tolist():
            others = [column for column in range(len(names)) if column != target]
            chosen = random.permutation(others)[: random.integers(1, MAX_FEATURES + 1)]
            candidates.append((f"{source}: {names[target]}", rows[:, chosen], rows[:, target]))
    return [candidates[index] for index in random.permutation(len(candidates))[:num_sets]]


def split(target: np.ndarray, seed: tuple[int, ...], n: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows to learn from and to be judged by."""
    order = np.random.default_rng(seed).permutation(len(target))
    return order[:n], order[n : n + MAX_TEST_ROWS]


# -- the peers: each is fitted to x [n, D] and y [n], and predicts [Q]

Predict = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def sklearn_peer(make: Callable[[int, int], Any]) -> Predict:
    """Features standardised by the rows; target too."""

    def predict(x: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
        from sklearn.compose import TransformedTargetRegressor
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        model = make_pipeline(StandardScaler(), make(*x.shape))
        return TransformedTargetRegressor(model, transformer=StandardScaler()).fit(x, y).predict(query)

    return predict


def gaussian_process(ard: bool) -> Callable[[int, int], Any]:
    def make(n: int, num_columns: int) -> Any:
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

        scale = np.full(num_columns, np.sqrt(num_columns)) if ard else np.sqrt(num_columns)
        kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(scale, (0.1, 100)) + WhiteKernel(0.1, (1e-4, 10))
        return GaussianProcessRegressor(kernel, random_state=0)

    return make


def ridge(alphas: list[float]) -> Callable[[int, int], Any]:
    def make(n: int, num_columns: int) -> Any:
        from sklearn.linear_model import Ridge, RidgeCV

        return RidgeCV(alphas) if len(alphas) > 1 and n > 2 else Ridge(1.0)

    return make


def bayesian_ridge(n: int, num_columns: int) -> Any:
    from sklearn.linear_model import BayesianRidge

    return BayesianRidge()


def mlp(n: int, num_columns: int) -> Any:
    from sklearn.neural_network import MLPRegressor

    return MLPRegressor(hidden_layer_sizes=(32,), solver="lbfgs", alpha=1.0, max_iter=200, random_state=0)


def xgboost_default(x: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    from xgboost import XGBRegressor

    return XGBRegressor(n_jobs=1).fit(x, y).predict(query)


def xgboost_tuned(x: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    """The best of eight settings by cross-validation with at most five folds; of two rows, one at a time."""
    from sklearn.model_selection import GridSearchCV, KFold
    from xgboost import XGBRegressor

    grid = {"max_depth": [1, 3], "learning_rate": [0.1, 0.3], "n_estimators": [20, 100]}
    folds = KFold(min(len(x), 5), shuffle=True, random_state=0)
    model = XGBRegressor(n_jobs=1, min_child_weight=1, subsample=1.0)
    return GridSearchCV(model, grid, scoring="neg_mean_squared_error", cv=folds).fit(x, y).predict(query)


def pairwise_differences(x: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    import pandas as pd
    from pdll import PairwiseDifferenceRegressor
    from sklearn.ensemble import ExtraTreesRegressor

    model = PairwiseDifferenceRegressor(ExtraTreesRegressor(n_estimators=50, random_state=0))
    names = [f"c{index}" for index in range(x.shape[1])]
    fitted = model.fit(pd.DataFrame(x, columns=names), pd.Series(y))
    return np.asarray(fitted.predict(pd.DataFrame(query, columns=names)), float)


def mean(x: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    return np.full(len(query), y.mean())


PEERS: dict[str, Predict] = {
    "mean": mean,
    "ridge": sklearn_peer(ridge([1.0])),
    "ridge, tuned": sklearn_peer(ridge([0.01, 0.1, 1.0, 10.0, 100.0])),
    "BayesianRidge": sklearn_peer(bayesian_ridge),
    "GP": sklearn_peer(gaussian_process(ard=False)),
    "GP, ARD": sklearn_peer(gaussian_process(ard=True)),
    "MLP": sklearn_peer(mlp),
    "pdll": pairwise_differences,
    "XGBoost": xgboost_default,
    "XGBoost, tuned": xgboost_tuned,
}


# -- classes

CLASS_SETS = ("iris", "wine", "breast_cancer")


def read_class_sets() -> list[tuple[np.ndarray, np.ndarray]]:
    """Features [N, D], the first ten, and classes [N]."""
    from sklearn import datasets

    loaded = [getattr(datasets, f"load_{name}")() for name in CLASS_SETS]
    return [(np.asarray(each.data[:, :MAX_FEATURES], float), np.asarray(each.target)) for each in loaded]


def split_classes(target: np.ndarray, seed: tuple[int, ...], n: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows to learn from, which have each class, and to be judged by."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(target))
        if len(np.unique(target[order[:n]])) == len(np.unique(target)):
            return order[:n], order[n : n + MAX_TEST_ROWS]


def judge_classes(probability: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """Log loss, of probabilities of at least 1e-6, and accuracy."""
    own = np.clip(probability[np.arange(len(target)), target], 1e-6, 1)
    return float(-np.log(own).mean()), float((probability.argmax(1) == target).mean())


def classify(x: np.ndarray, y: np.ndarray, query: np.ndarray) -> dict[str, np.ndarray]:
    """Probabilities [Q, classes] of each peer."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from xgboost import XGBClassifier

    models = {
        "frequencies": None,
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        "XGBoost": XGBClassifier(n_jobs=1),
    }
    counts = np.bincount(y) / len(y)
    return {
        name: np.tile(counts, (len(query), 1)) if model is None else model.fit(x, y).predict_proba(query)
        for name, model in models.items()
    }


def main(folder: str, seed: int, num_sets: int) -> None:
    warnings.simplefilter("ignore")  # of convergence, on two rows
    sets = draw_sets(seed, num_sets)
    arrays = {f"x{index}": x for index, (_, x, _) in enumerate(sets)} | {f"y{i}": y for i, (*_, y) in enumerate(sets)}
    class_sets = read_class_sets()
    arrays |= {f"cx{index}": x for index, (x, _) in enumerate(class_sets)}
    arrays |= {f"cy{index}": y for index, (_, y) in enumerate(class_sets)}
    np.savez(Path(folder) / "sets.npz", **arrays)  # type: ignore[arg-type]
    say(names=[name for name, *_ in sets])
    for command in commands():
        index, n = command["set"], command["n"]
        if command.get("classes"):
            x, y = class_sets[index]
            known, unknown = split_classes(y, (seed, index, n, command["repeat"]), n)
            found = classify(x[known], y[known], x[unknown])
            say(scores={name: judge_classes(each, y[unknown]) for name, each in found.items()})
            continue
        _, x, y = sets[index]
        known, unknown = split(y, (seed, index, n, command["repeat"]), n)
        errors, seconds = {}, {}
        for name, predict in PEERS.items():
            began_s = time.perf_counter()
            found = predict(x[known], y[known], x[unknown])
            seconds[name] = time.perf_counter() - began_s
            errors[name] = float(np.sqrt(np.mean((found - y[unknown]) ** 2)))
        say(errors=errors, seconds=seconds)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
