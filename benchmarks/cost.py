"""What is predicted before a run beside what the run measures, for every recipe under every plan that applies to it.

python -m benchmarks.cost

Pipelines, whose bubble is a matter of times, are predicted and measured several times, in turn; medians are compared.
Predicted by `shoal inspect` in one process; measured by the probe of a real run of two ranks with one thread each
(under torchrun; one process for `single`): memory as the allocator tells it, arithmetic operator by operator, bytes by
collective. A pipeline is cut by both where the prediction cuts it, as the search goes by measured times. The bubble is
also told for where computing dominates: a transformer of width 256.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import shoal.runs
from benchmarks.children import ROOT
from benchmarks.result import Row, options, spread, write
from shoal.cost import MEASURED
from shoal.cost.cost_table import QUANTITY_BY_NAME, format_quantity, relative_error
from shoal.cost.step_profiler import MAX_MORE, NUM_TIMED, NUM_WARM_UP

RECIPES = ("lenet", "transformer", "forecaster", "benchmarks/ours/perceptron_task.py")
PLANS = ("single", "ddp", "fsdp", "tensor", "pipeline")
LARGE = ("args.width=256", "args.depth=4", "args.heads=8", "batch_size=64")  # computing dominates
OF_PIPELINE = 3
BAR = 0.10
TIMEOUT_S = 300.0
SHORT, ALL = (
    NUM_WARM_UP + NUM_TIMED + 1,
    NUM_WARM_UP + NUM_TIMED + 1 + MAX_MORE,
)  # steps that a probe looks at, of long ones and of short
JUDGED = {"memory_peak": "memory", "flops_step": "FLOPs", "sent_bytes": "bytes sent", "bubble": "pipeline bubble"}
_PINNED = """
from shoal.train.launch.overrides import load_recipe
from shoal.train.task import find_task

class Pinned(find_task({recipe!r})):
    def pipeline_cuts(self):
        return {cuts!r}

def spec():
    return load_recipe({recipe!r})
"""


@dataclass(frozen=True)
class Case:
    """One recipe under one plan. `words` beyond the plan's own."""

    recipe: str
    plan: str
    words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{Path(self.recipe).stem}, {self.plan}" + (", large" if self.words else "")

    @property
    def workers(self) -> int:
        return 1 if self.plan == "single" else 2

    def all_words(self) -> list[str]:
        return [f"parallel={self.plan}", f"workers={self.workers}", "threads=1", "device=cpu", *self.words]


def cases(quick: bool) -> Iterator[Case]:
    """Every recipe under every plan; quick: one recipe."""
    for recipe in RECIPES[-1:] if quick else RECIPES:
        for plan in PLANS:
            yield Case(recipe, plan)
    if not quick:
        yield Case("transformer", "pipeline", LARGE)


def predicted(case: Case) -> dict[str, object] | None:
    """What `shoal inspect` says; None where the plan does not apply."""
    program = [sys.executable, "-c", "from shoal.cli import main; main()", "inspect", case.recipe, *case.all_words()]
    done = subprocess.run(
        [*program, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        print(f"{case.name}: does not apply: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return None
    found: dict[str, object] = json.loads(done.stdout)
    return found


def measured(case: Case, cuts: object, folder: Path) -> dict[str, float]:
    """What a real run measures, in as many steps as its probe looks at."""
    task = case.recipe
    if cuts:
        pinned = folder / f"pinned_{Path(case.recipe).stem}.py"
        pinned.write_text(_PINNED.format(recipe=case.recipe, cuts=cuts))
        task = f"{pinned}:Pinned"
    home = Path(tempfile.mkdtemp(dir=folder))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.workers}"]
    steps = SHORT if case.words else ALL
    words = [f"task={task}", *case.all_words(), f"stop={{steps: {steps}}}", "name=cost-benchmark"]
    subprocess.run(
        [sys.executable, *launcher, "-m", "shoal.train", *words],
        cwd=ROOT,
        env={**os.environ, "SHOAL_HOME": str(home), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=TIMEOUT_S,
        stdout=subprocess.DEVNULL,
    )
    os.environ["SHOAL_HOME"] = str(home)
    found: dict[str, float] = shoal.runs.load("latest").last_events()[MEASURED]
    return found


def main() -> int:
    chosen = options(__doc__, runs=1)
    table: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(chosen.quick):
            pairs = []
            for _ in range(OF_PIPELINE if case.plan == "pipeline" else 1):
                before = predicted(case)
                if before is None:
                    break
                pairs.append(_beside(before, measured(case, before.get("cuts"), Path(folder))))
            if pairs:
                table[case.name] = _medians(pairs)
                print(_line(case.name, table[case.name]), flush=True)
    rows = [_row(label, judged, BAR) for quantity, label in JUDGED.items() if (judged := _judged(quantity, table))]
    large = {name: both for name, both in _judged("bubble", table).items() if "large" in name}
    if large:
        rows.append(_row("pipeline bubble, where computing dominates", large, None))
    write("cost", rows, chosen.results)
    return 0


def _beside(before: dict[str, object], after: dict[str, float]) -> dict[str, list[float]]:
    """[predicted, measured] by name, of what both know."""
    both = [name for name in (*JUDGED, "step_s") if name in before and name in after]
    return {name: [float(str(before[name])), after[name]] for name in both}


def _medians(pairs: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Of several [predicted, measured] by name."""
    return {name: [statistics.median(each[name][place] for each in pairs) for place in (0, 1)] for name in pairs[0]}


def _line(name: str, values: dict[str, list[float]]) -> str:
    words = []
    for quantity, (said, was) in values.items():
        unit = QUANTITY_BY_NAME[quantity].unit
        words.append(
            f"{quantity} {format_quantity(said, unit)} / {format_quantity(was, unit)} "
            f"({relative_error(said, was):+.1%})"
        )
    return f"{name}: {', '.join(words)}"


def _judged(quantity: str, table: dict[str, dict[str, list[float]]]) -> dict[str, list[float]]:
    """[predicted, measured] of one quantity, by case."""
    return {name: values[quantity] for name, values in table.items() if quantity in values}


def _row(label: str, judged: dict[str, list[float]], bar: float | None) -> Row:
    """The worst case of one quantity; all cases are in the runs."""
    misses = [abs(relative_error(*both)) for both in judged.values()]
    runs = {"ours": spread(misses), "cases": judged}
    note = f"the worst of {len(judged)} recipes and plans; [predicted, measured] of each are in `cost.json`"
    name = f"predicted {label}: how far from measured"
    return Row(name, "", max(misses), None, None, None, bar, "value" if bar else None, "lower", runs, note)


if __name__ == "__main__":
    sys.exit(main())
