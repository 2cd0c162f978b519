"""Ten public tables with words, dates and gaps: `shoal run table` at its defaults beside XGBoost at its defaults.

    python -m benchmarks.tables [--runs SEEDS] [--minutes M] [--python .venv-tables/bin/python]

Each seed holds a fifth of the rows back, by which both are judged: accuracy for classes, R² for numbers. XGBoost learns
from all of the other rows; ours takes a fifth of them for its early stop. Each side reads the same rows, ours the CSV
file as it is. The environment of the peer is made of benchmarks/tables.txt. After `--minutes` the same command goes on
with the next table. Every fit is of one thread.

For each column of each table, an unknown word, a gap and a value that is none of its kind are sent through the model's
`preprocess`: an error must name the column. The last row counts the commands of docs/tutorials/table.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

from benchmarks.children import ROOT
from benchmarks.result import QUICK_RESULTS, Row, compare, options, write
from shoal.errors import DataError
from shoal.libs.tabular.reading import extract_values, read_table
from shoal.libs.tabular.task import TableTask
from shoal.train.launch.local import fit_locally
from shoal.train.launch.overrides import spec_from_overrides
from shoal.weights.tensor_files import list_files, open_tensors

FOLDER = QUICK_RESULTS / "tables"
PEER_SCRIPT = ROOT / "benchmarks" / "peers" / "tables_xgboost.py"
XGBOOST = "XGBoost"


def run_peer(python: str, seeds: int) -> list[dict[str, Any]]:
    """The peer's scores; the files of each table and seed are there then."""
    log = FOLDER / f"xgboost-{seeds}.jsonl"
    if not log.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        words = [python, "-W", "ignore", str(PEER_SCRIPT), str(FOLDER), str(seeds)]
        log.write_text(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=900).stdout)
    return [json.loads(line) for line in log.read_text().splitlines()]


def run_ours(name: str, seed: int, target: str, overrides: list[str]) -> dict[str, Any]:
    """One run of the recipe, judged by the test rows."""
    folder = FOLDER / name / str(seed)
    fields = ["task=table", f"data={folder / 'train.csv'}", f"target={target}", "trees=false", "threads=1", *overrides]
    spec = spec_from_overrides(fields)
    began, began_cpu = time.perf_counter(), time.process_time()
    result = fit_locally(spec, registers=False)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    task = TableTask(**spec.args)
    network = task.model().eval()
    assert result.weights is not None
    network.load_state_dict(dict(open_tensors(list_files(result.weights))))
    test = read_table(folder / "test.csv")
    values = {
        each.name: extract_values(each.name, test.column(each.name), each.full_kind) for each in task.encoders.columns
    }
    answers = extract_values(target, test.column(target), "word" if task.encoders.target.classes else "number")
    with torch.no_grad():
        inputs = task.encoders.encode(values, is_strict=False)
        found = task.postprocess({"output": network(*map(torch.from_numpy, inputs.values())).numpy()})[target]
    is_class = bool(task.encoders.target.classes)
    score = np.mean(found == answers) if is_class else 1 - np.square(found - answers).mean() / answers.var()
    return {
        **{"table": name, "seed": seed, "score": float(score), "seconds": seconds, "cpu_s": cpu_s},
        **{"rows": len(test) * 5, "steps": result.steps, "unnamed": count_unnamed(task)},
    }


def count_unnamed(task: TableTask) -> int:
    """Errors of unusual values that do not name their column."""
    columns = task.encoders.columns
    usual = {
        each.name: np.array([each.vocabulary[0].encode()], object) if each.kind == "word" else np.array([1.0])
        for each in columns
    }
    unnamed = 0
    for each in columns:
        unusual = (b"", b"no such word") if each.kind == "word" else (np.nan, np.inf, 1e300)
        for value in unusual:
            changed = {**usual, each.name: np.array([value], object if each.kind == "word" else None)}
            try:
                task.preprocess(changed)
            except DataError as error:
                unnamed += error.field != each.name
    return unnamed


def get_size(name: str) -> int:
    return (FOLDER / name / "0" / "train.csv").stat().st_size


def measure(peers: list[dict[str, Any]], minutes: float, overrides: list[str]) -> list[dict[str, Any]]:
    """Ours for each line of the peer's, from a log of earlier calls on; those for which there was time."""
    log = FOLDER / f"ours{'-'.join(['', *overrides])}.jsonl"
    found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {(each["table"], each["seed"]) for each in found}
    began = time.monotonic()
    for each in sorted(peers, key=lambda line: (line["seed"], get_size(line["table"]))):
        if (each["table"], each["seed"]) in done:
            continue
        if time.monotonic() - began > minutes * 60:
            break
        found.append(run_ours(each["table"], each["seed"], each["target"], overrides))
        print(json.dumps(found[-1]), f"{XGBOOST} {each['score']:.4f}", flush=True)
        with log.open("a") as file:
            file.write(json.dumps(found[-1]) + "\n")
    return found


def make_rows(found: list[dict[str, Any]], peers: list[dict[str, Any]]) -> list[Row]:
    scores = {(each["table"], each["seed"]): each["score"] for each in peers}
    pairs = [(each, scores[each["table"], each["seed"]]) for each in found]
    tables = list(dict.fromkeys(each["table"] for each in found))
    seeds = sorted({each["seed"] for each in found})
    own = [float(np.mean([each["score"] for each in found if each["seed"] == seed])) for seed in seeds]
    theirs = [float(np.mean([score for each, score in pairs if each["seed"] == seed])) for seed in seeds]
    parts = []
    for name in tables:
        ours = np.mean([each["score"] for each in found if each["table"] == name])
        peer = np.mean([score for each, score in pairs if each["table"] == name])
        parts.append(f"{name} {ours:.3f} and {peer:.3f}")
    note = f"accuracy, or R² (diamonds, films, houses, temperature); ours and {XGBOOST}'s: {', '.join(parts)}"
    rows = [
        compare("mean score of ten tables", "score", "higher", own, theirs, XGBOOST, 0.98, "ratio", note),
        compare(
            "errors that name no column", "errors", "lower", [float(sum(each["unnamed"] for each in found))],
            bar=0.0, bar_kind="value", note="of unknown words, gaps and values of no kind, in each column",
        ),
    ]  # fmt: skip
    large = [each["cpu_s"] for each in found if each["rows"] >= 9_000]
    if large:
        rows.append(
            compare("a run on 10,000 rows, one thread", "s of processor", "lower", large, bar=120, bar_kind="value")
        )
    return rows


def count_commands() -> Row:
    """Those of the tutorial, from the file to the answer."""
    page = (ROOT / "docs" / "tutorials" / "table.md").read_text()
    part = page[page.index("## Train") : page.index("## What becomes of a column")]
    blocks = re.findall(r"^```\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    commands = [line for block in blocks for line in block.splitlines() if line]
    note = (
        "run, deploy, curl; MLflow with scikit-learn takes 14 lines: pipeline, fit, signature, log_model, serve, curl"
    )
    return compare(
        "CSV to a raw row's answer", "commands", "lower", [float(len(commands))], bar=3.0, bar_kind="value", note=note
    )


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--python", default=str(ROOT / ".venv-tables" / "bin" / "python"))
    own.add_argument("--override", action="append", default=[])
    added, sys.argv[1:] = own.parse_known_args()
    chosen = options(__doc__, runs=3, minutes=60.0)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    peers = run_peer(added.python, chosen.runs)
    with tempfile.TemporaryDirectory() as home:
        os.environ["SHOAL_HOME"] = home
        found = measure(peers, chosen.minutes, added.override)
    write("tables", [*make_rows(found, peers), count_commands()], chosen.results)


if __name__ == "__main__":
    main()
