"""scikit-surprise and implicit on one set of ratings; one thread.

    .venv-recommender/bin/python benchmarks/peers/surprise_ratings.py RATINGS.npz

Takes {"algorithm", "fold"} and says the RMSE of that fold, and the seconds of fit and prediction; {"algorithm":
"implicit"} fits its ALS to all ratings and says how long folding in a user and finding 200 films takes.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import numpy as np

from benchmarks.talk import commands, say


def measure(table: Any, algorithm: str, is_test: np.ndarray) -> dict[str, Any]:
    import surprise

    kinds = {
        "SVD++": lambda: surprise.SVDpp(random_state=0),
        "SVD": lambda: surprise.SVD(random_state=0),
        "kNN": lambda: surprise.KNNBaseline(
            sim_options={"name": "pearson_baseline", "user_based": False}, verbose=False
        ),
        "biases": lambda: surprise.BaselineOnly(verbose=False),
    }
    rows = [
        list(
            zip(table["user"][part].tolist(), table["item"][part].tolist(), table["rating"][part].tolist(), strict=True)
        )
        for part in (~is_test, is_test)
    ]
    reader = surprise.Reader(rating_scale=(1, 5))
    trainset = surprise.Dataset(reader).construct_trainset([(*row, None) for row in rows[0]])
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    found = kinds[algorithm]().fit(trainset)
    predictions = found.test(rows[1])
    cpu_s = time.process_time() - began_cpu_s
    errors = np.array([each.est - each.r_ui for each in predictions])
    rmse = float(np.sqrt(np.square(errors).mean()))
    return {"rmse": rmse, "seconds": time.perf_counter() - began_s, "cpu_s": cpu_s}


def fold_in(table: Any, num_users: int) -> dict[str, Any]:
    """Milliseconds of implicit's recommend with recalculate_user, for each user."""
    import implicit
    from scipy.sparse import csr_matrix

    matrix = csr_matrix((table["rating"].astype(np.float32), (table["user"], table["item"])))
    model = implicit.als.AlternatingLeastSquares(factors=10, random_state=0, num_threads=1)
    model.fit(matrix, show_progress=False)
    took_ms = []
    for user in range(num_users):
        began_s = time.perf_counter()
        model.recommend(user, matrix[user], N=200, recalculate_user=True)
        took_ms.append(1e3 * (time.perf_counter() - began_s))
    return {"ms": took_ms}


def main() -> None:
    warnings.simplefilter("ignore")
    table = np.load(sys.argv[1])
    say(ready=True)
    for command in commands():
        if command["algorithm"] == "implicit":
            say(**fold_in(table, command["users"]))
        else:
            fold = command["fold"]
            is_test = table["by_time"] if fold == "time" else table["fold"] == fold
            say(**measure(table, command["algorithm"], is_test))


if __name__ == "__main__":
    main()
