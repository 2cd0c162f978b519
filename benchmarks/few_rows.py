"""Regression from two to twenty rows: the network of the package beside ten peers, on real tables; classes; the start.

    python -m benchmarks.few_rows [--runs N] [--minutes M] [--quick]

The network is that of the package, or of the registry with `SHOAL_FEW_ROWS=few-rows@champion`. The seed of the draw is
taken from the bytes of its weights, so that the tables are drawn after the network is frozen. 40 sets: a target and up
to ten features, columns of the real tables that scikit-learn and statsmodels carry. For each set and each n in 2, 4, 8,
12, 20, N splits: n rows to learn from, up to 50 others to be judged by. Ours is one forward of one table and the
summary of its answer; the peers are fitted in an environment of their own, .venv-fewrows, to the same rows, and one
after the other. All have one thread. After `--minutes` the repeat that is under way is dropped; the same command goes
on with it.

Classes: three tables of scikit-learn, 8, 12 and 20 rows of which each class has one at least, ten splits. The start: a
process that imports shoal, and answers twelve rows of a table with words and gaps by `shoal.few_rows`, from its start
to its end. TabPFN, the peer of that, is not measured: its weights come from a hub, and are no part of its package.

The error of a set is the mean over the splits of the root mean squared error. Peers: see benchmarks/peers/few_rows.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from scipy.stats import friedmanchisquare, rankdata, wilcoxon

from benchmarks.children import ROOT, Child, scratch
from benchmarks.peers.few_rows import CLASS_SETS, judge_classes, split_classes
from benchmarks.result import QUICK_RESULTS, Row, compare, options, write
from shoal.libs.tables.few_rows import FewRows, load_network
from shoal.libs.tables.network import predict

MODEL = os.environ.get("SHOAL_FEW_ROWS", "")
SIZES, NUM_SETS, MAX_TEST_ROWS, CLASS_SIZES = (2, 4, 8, 12, 20), 40, 50, (8, 12, 20)
START = """
import shoal
city = ("Bern", "Chur", None)
rows = [{"area": 40 + 5 * at, "city": city[at % 3], "since": f"20{10 + at}-03-01"} for at in range(12)]
found = shoal.few_rows(rows, [90.0 + 12 * at for at in range(12)]).predict(rows)
assert len(found.mean) == len(found.interval_90[1]) == 12
"""
PEER_PYTHON = str(ROOT / ".venv-fewrows" / "bin" / "python")
TUNED, OURS, WAIT_S = "XGBoost, tuned", "ours", 600.0
NUM_CHILDREN = 2
Split = tuple[int, ...]  # repeat, set, place in the sizes


def load() -> tuple[torch.nn.Module, int, str]:
    """The network, the seed of the draw, and what identifies it."""
    network = load_network(MODEL)
    tensors = network.state_dict()
    digest = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()
    return network, int(digest[:8], 16), f"{MODEL or 'the network of the package'}, sha256 {digest[:16]}"


def split(num_rows: int, seed: tuple[int, ...], n: int) -> tuple[np.ndarray, np.ndarray]:
    """As the peers' side."""
    order = np.random.default_rng(seed).permutation(num_rows)
    return order[:n], order[n : n + MAX_TEST_ROWS]


class Found:
    """Errors [methods, repeats, sets, sizes], times of each method, and the coverage of our 90% intervals.

    Every split is a line of `log`, from which a run that is started again goes on.
    """

    def __init__(self, log: Path, shape: Split) -> None:
        self.shape, self.log = shape, log
        self.errors: dict[str, np.ndarray] = {}
        self.seconds: dict[str, list[float]] = {}
        self.covered = np.full(shape, np.nan)
        self.done: set[Split] = set()
        log.parent.mkdir(parents=True, exist_ok=True)
        for line in log.read_text().splitlines() if log.exists() else []:
            at, covered, errors, seconds = json.loads(line)
            if np.less(at, shape).all():
                self._add(tuple(at), covered, errors, seconds)

    def add(self, at: Split, covered: float, errors: dict[str, float], seconds: dict[str, float]) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps([at, covered, errors, seconds]) + "\n")
        self._add(at, covered, errors, seconds)

    def _add(self, at: Split, covered: float, errors: dict[str, float], seconds: dict[str, float]) -> None:
        self.done.add(at)
        self.covered[at] = covered
        for name, error in errors.items():
            self.errors.setdefault(name, np.full(self.shape, np.nan))[at] = error
            self.seconds.setdefault(name, []).append(seconds[name])

    def keep_complete(self) -> None:
        """Drop the repeat that the deadline has ended, or, if it is the first, the sets that it did not reach."""
        is_done = ~np.isnan(self.covered).any(2)  # [repeats, sets]
        repeats = is_done.all(1) if is_done[0].all() else np.arange(len(is_done)) == 0
        sets = is_done[0]
        self.errors = {name: errors[repeats][:, sets] for name, errors in self.errors.items()}
        self.covered = self.covered[repeats][:, sets]


def answer(network: torch.nn.Module, x: np.ndarray, y: np.ndarray, seed: tuple[int, ...]) -> tuple[float, float, float]:
    """Our error, coverage and seconds on one split."""
    known, unknown = split(len(y), seed, seed[2])
    began_s = time.perf_counter()
    answered = predict(network, x[known], y[known], x[unknown])
    took_s = time.perf_counter() - began_s
    error = float(np.sqrt(np.mean((answered.mean - y[unknown]) ** 2)))
    low, high = answered.interval_90
    return error, float(((low <= y[unknown]) & (y[unknown] <= high)).mean()), took_s


def measure(
    network: torch.nn.Module, seed: int, runs: int, sizes: tuple[int, ...], num_sets: int, minutes: float
) -> Found:
    """Alternates: a few of our answers, then the peers' to the same splits, each child one split."""
    deadline_s = time.monotonic() + 60 * minutes
    with scratch() as folder, ExitStack() as closing:
        words = [PEER_PYTHON, "-m", "benchmarks.peers.few_rows", str(folder), str(seed), str(num_sets)]
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        children = [closing.enter_context(Child(words, folder, env=single)) for _ in range(NUM_CHILDREN)]
        names, *_ = [child.answer(WAIT_S)["names"] for child in children]
        print(*names, sep="\n", flush=True)
        sets = dict(np.load(Path(folder) / "sets.npz"))
        found = Found(QUICK_RESULTS / f"few_rows-{seed}-{num_sets}.jsonl", (runs, len(names), len(sizes)))
        tasks = [at for at in itertools.product(*map(range, found.shape)) if at not in found.done]
        for _ in range(3):  # the first forwards of a process are slower
            predict(network, sets["x0"][:8], sets["y0"][:8], sets["x0"][8:16])
        for begin in range(0, len(tasks), NUM_CHILDREN):
            if time.monotonic() > deadline_s:
                break
            some = tasks[begin : begin + NUM_CHILDREN]
            ours = [
                answer(network, sets[f"x{index}"], sets[f"y{index}"], (seed, index, sizes[size], repeat))
                for repeat, index, size in some
            ]
            for (repeat, index, size), child in zip(some, children, strict=False):
                child.tell(set=index, n=sizes[size], repeat=repeat)
            for at, child, (error, covered, took_s) in zip(some, children, ours, strict=False):
                reported = child.answer(WAIT_S)
                errors, seconds = {OURS: error, **reported["errors"]}, {OURS: took_s, **reported["seconds"]}
                found.add(at, covered, errors, seconds)
            if begin % 40 == 0:
                print(f"{begin} of {len(tasks)} splits", flush=True)
        found.keep_complete()
        return found


def measure_classes(seed: int, runs: int) -> list[Row]:
    """Ours beside the classifiers, one after the other: a mean over sets, sizes and splits."""
    scores: dict[str, list[tuple[float, float]]] = {}
    with scratch() as folder, ExitStack() as closing:
        words = [PEER_PYTHON, "-m", "benchmarks.peers.few_rows", str(folder), str(seed), "1"]
        child = closing.enter_context(Child(words, folder, env={"OMP_NUM_THREADS": "1"}))
        child.answer(WAIT_S)
        sets = dict(np.load(Path(folder) / "sets.npz"))
        for index, n, repeat in itertools.product(range(len(CLASS_SETS)), CLASS_SIZES, range(runs)):
            x, y = sets[f"cx{index}"], sets[f"cy{index}"]
            known, unknown = split_classes(y, (seed, index, n, repeat), n)
            answered = FewRows(x[known], [str(each) for each in y[known]], MODEL).predict(x[unknown])
            child.tell(set=index, n=n, repeat=repeat, classes=True)
            found = {OURS: judge_classes(answered.probability, y[unknown]), **child.answer(WAIT_S)["scores"]}
            for name, each in found.items():
                scores.setdefault(name, []).append(tuple(each))
    peers = [name for name in scores if name != OURS]
    rows = []
    for at, (what, unit, better) in enumerate((("log loss", "nats", "lower"), ("accuracy", "share", "higher"))):
        means = {name: statistics.fmean(each[at] for each in found) for name, found in scores.items()}
        best = (min if at == 0 else max)(peers, key=lambda name: means[name])
        note = f"{', '.join(CLASS_SETS)}; n = {', '.join(map(str, CLASS_SIZES))}; means: "
        note += ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        rows.append(compare(f"classes: {what}", unit, better, [means[OURS]], [means[best]], best, 1.0, "ratio", note))
    return rows


def measure_start(runs: int) -> Row:
    """Seconds of a process from its start to its end, with twelve answers."""
    seconds, processor_s = [], []
    for _ in range(runs):
        began_s, before = time.perf_counter(), os.times()
        subprocess.run([sys.executable, "-c", START], check=True, cwd="/", timeout=WAIT_S)
        seconds.append(time.perf_counter() - began_s)
        processor_s.append(sum(os.times()[2:4]) - sum(before[2:4]))
    note = f"a process of its own, {statistics.median(processor_s):.1f} s of processor time; "
    note += "TabPFN has no weights in its package, and was not measured"
    return compare("from import to twelve answers", "s", "lower", seconds, bar=10.0, bar_kind="value", note=note)


def make_rows(found: Found, sizes: tuple[int, ...], which: str) -> list[Row]:
    """The rows of the file; a set's error is the mean over its splits."""
    names = list(found.errors)
    table = np.stack([found.errors[name].mean(0) for name in names], -1)  # [sets, n, methods]
    ours, tuned = names.index(OURS), names.index(TUNED)
    better = table[..., ours] < table[..., tuned]  # [sets, n]
    covered = found.covered.mean((0, 1))
    note = f"{which}; {len(table)} sets, {len(found.covered)} splits of each; n = {', '.join(map(str, sizes))}"
    return [
        compare("sets on which ours is better than tuned XGBoost, all n", "share", "higher", [float(better.mean())],
                bar=0.8, bar_kind="value", note=note),
        *(
            compare(f"sets on which ours is better than tuned XGBoost, n = {n}", "share", "higher",
                    [float(better[:, index].mean())], bar=0.75 if n == 2 else 0.8, bar_kind="value",
                    note=per_n(table[:, index], names))
            for index, n in enumerate(sizes)
        ),
        make_rank_row(table, names),
        *(
            compare(f"90% intervals cover, n = {n}", "share", "higher", [float(share)], bar=0.85, bar_kind="value",
                    note="the bar is 85% to 95%")
            for n, share in zip(sizes, covered, strict=True)
        ),
        compare("time to an answer", "s", "lower", found.seconds[OURS], found.seconds[TUNED], TUNED, 0.05, "ratio",
                "medians: " + ", ".join(f"{name} {np.median(s) * 1000:.1f} ms" for name, s in found.seconds.items())),
    ]  # fmt: skip


def make_rank_row(table: np.ndarray, names: list[str]) -> Row:
    """Mean ranks over sets and n, beside the best peer's; with Friedman's test, and Wilcoxon's against each peer."""
    ranks = dict(zip(names, rankdata(table, axis=-1).mean((0, 1)).tolist(), strict=True))
    ordered = sorted(ranks, key=ranks.__getitem__)
    peer = next(name for name in ordered if name != OURS)
    flat = np.log(table.reshape(-1, len(names)) + 1e-12)
    own = flat[:, names.index(OURS)]
    tests = {name: wilcoxon(own, flat[:, at]).pvalue for at, name in enumerate(names) if name != OURS}
    note = ", ".join(f"{name} {ranks[name]:.2f}" for name in ordered)
    note += f"; Friedman p {friedmanchisquare(*flat.T).pvalue:.1e}; Wilcoxon of the log errors against each: "
    note += ", ".join(f"{name} {p:.1e}" for name, p in tests.items())
    return compare("mean rank of 11", "rank", "lower", [ranks[OURS]], [ranks[peer]], peer, 1.0, "ratio", note)


def per_n(errors: np.ndarray, names: list[str]) -> str:
    """Mean ranks at one n, and the share of sets on which ours is better than each."""
    ranks, ours = rankdata(errors, axis=-1).mean(0), names.index(OURS)
    shares = {name: (errors[:, ours] < errors[:, index]).mean() for index, name in enumerate(names) if index != ours}
    ordered = ", ".join(f"{name} {rank:.2f}" for rank, name in sorted(zip(ranks.tolist(), names, strict=True)))
    return f"mean ranks: {ordered}; ours is better than " + ", ".join(f"{n} {s:.0%}" for n, s in shares.items())


def main() -> None:
    chosen = options(__doc__, runs=30, minutes=60.0)
    torch.set_num_threads(1)
    network, seed, which = load()
    sizes: tuple[int, ...] = (2, 8) if chosen.quick else SIZES
    found = measure(network, seed, chosen.runs, sizes, 8 if chosen.quick else NUM_SETS, chosen.minutes)
    rows = make_rows(found, sizes, f"{which}, draw {seed}")
    rows += [measure_start(1 if chosen.quick else 5), *measure_classes(seed, 1 if chosen.quick else 10)]
    write("few_rows", rows, chosen.results)


if __name__ == "__main__":
    main()
