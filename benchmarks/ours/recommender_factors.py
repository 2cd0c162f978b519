"""Our factors on one set of ratings, one thread: the answers of benchmarks/peers/surprise_ratings.py.

python benchmarks/ours/recommender_factors.py RATINGS.npz
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.talk import commands, say

sys.path.append(str(Path(__file__).parents[2] / "serve_apps" / "recommender"))

from films.factorisation import Ratings, find_best, fit, fold_in, predict

NUM_FACTORS, NUM_SWEEPS = 10, 8  # those of films/management/commands/retrain.py


def measure(table: Any, is_test: np.ndarray) -> dict[str, Any]:
    user, item, rating = table["user"], table["item"], table["rating"]
    sizes = int(user.max()) + 1, int(item.max()) + 1
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    items, users = fit(Ratings(user[~is_test], item[~is_test], rating[~is_test], *sizes), NUM_FACTORS, NUM_SWEEPS)
    predicted = predict(items, users, user[is_test], item[is_test]).clip(1, 5)
    rmse = float(np.sqrt(np.square(predicted - rating[is_test]).mean()))
    return {"rmse": rmse, "seconds": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}


def fold_in_all(table: Any, num_users: int) -> dict[str, Any]:
    """Milliseconds of fold-in and the best 200, for each user."""
    user, item, rating = table["user"], table["item"], table["rating"]
    ratings = Ratings(user, item, rating, int(user.max()) + 1, int(item.max()) + 1)
    items, _ = fit(ratings, NUM_FACTORS, NUM_SWEEPS)
    took_ms = []
    for one in range(num_users):
        rated, stars = item[user == one], rating[user == one]
        began_s = time.perf_counter()
        find_best(items, fold_in(items, rated, stars), rated, 200)
        took_ms.append(1e3 * (time.perf_counter() - began_s))
    return {"ms": took_ms}


def main() -> None:
    table = np.load(sys.argv[1])
    say(ready=True)
    for command in commands():
        if command["algorithm"] == "fold-in":
            say(**fold_in_all(table, command["users"]))
        else:
            fold = command["fold"]
            say(**measure(table, table["by_time"] if fold == "time" else table["fold"] == fold))


if __name__ == "__main__":
    main()
