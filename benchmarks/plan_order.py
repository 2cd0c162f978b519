"""Whether `shoal plan` has the plans in the order of their measured step times: three Tasks, nine plans each.

    python -m benchmarks.plan_order [--runs N] [--quick]

Predicted by `shoal plan TASK devices=2`, measured by short runs of two workers (one for `one device`) on this machine's
two cores: under torchrun, or with their own servers. A run lasts some seconds; its step time is that between its first
and its last report after two seconds, without the one at the end. Prediction and runs take turns; medians are compared.
A pair of plans of one Task counts if its measured step times differ by more than 20%; the bar is that all of them are
in the predicted order.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import statistics
from pathlib import Path

from benchmarks.children import OUR_PYTHON, ROOT, Child, ChildFailed, scratch
from benchmarks.result import Row, options, spread, write

PERCEPTRON = ROOT / "benchmarks" / "ours" / "perceptron_task.py"
TASKS: dict[str, tuple[str, ...]] = {
    "lenet": ("schedule.name=constant", "schedule.warmup=0"),
    "transformer": ("args.width=192", "args.depth=4", "batch_size=32", "schedule.name=constant"),
    str(PERCEPTRON): ("args.hidden=[1024, 1024]", "batch_size=64", "schedule.name=constant"),
}
PLANS = (
    *("one device", "ddp=2", "fsdp=2", "tensor=2", "pipeline=2, 4 micro-batches", "parameter server, BSP"),
    *("parameter server, free-running", "local SGD, every 10 steps", "DiLoCo, every 10 steps"),
)
DIFFERENCE = 0.2
WARM_UP_S = 2.0
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
NO_PAUSES = (
    "evaluate.every_steps=1000000000",
    "checkpoint.every_s=.inf",
    "log_every_steps=2",
    "stop.epochs=null",
    "stop.target=null",
)


def predict(task: str, folder: Path) -> dict[str, dict[str, object]]:
    """What `shoal plan` says of each plan that applies."""
    words = ["-m", "shoal", "plan", task, *TASKS[task], "sync.every=10", "devices=2", "--json"]
    with Child([OUR_PYTHON, *words], folder, {"SHOAL_HOME": str(folder)}, goodbye_s=20.0) as child:
        if child.wait(300.0):
            raise ChildFailed(f"plan {task}: {child.last_words()}")
        child.close()
        found = json.loads("\n".join(child.output))
    return {plan["plan"]: plan for plan in found["plans"] if plan["is_possible"] and plan["plan"] in PLANS}


def measure(task: str, overrides: list[str], workers: int, seconds: float) -> float:
    """The seconds of a step of a real run."""
    is_synchronous = not any(word.startswith("sync.kind") for word in overrides)
    launcher = [*TORCHRUN, str(workers)] if is_synchronous and workers > 1 else []
    words = ["-m", "shoal.train", f"task={task}", *TASKS[task], *overrides, *NO_PAUSES, f"stop.wall_s={seconds}"]
    with scratch() as folder:
        with Child([OUR_PYTHON, *launcher, *words], folder, {"SHOAL_HOME": str(folder)}, goodbye_s=20.0) as child:
            if child.wait(300.0):
                raise ChildFailed(f"{shlex.join(words)}: {child.last_words()}")
        return _read_step_s(folder)


def _read_step_s(home: Path) -> float:
    os.environ["SHOAL_HOME"] = str(home)
    import shoal.runs

    [run] = shoal.runs.list_runs()
    metrics = run.metrics()
    steps = metrics["train/step"].dropna()
    times = metrics.loc[steps.index, "time"]
    later = times >= times.iloc[0] + WARM_UP_S
    later.iloc[-1] = False  # the last report follows the evaluation at the end
    times, steps = times[later], steps[later]
    return float((times.iloc[-1] - times.iloc[0]) / (steps.iloc[-1] - steps.iloc[0]))


def count_order(predicted: dict[str, float], measured: dict[str, float]) -> tuple[int, list[str]]:
    """The pairs that differ by more than DIFFERENCE, and those of them that the prediction has in the other order."""
    pairs = [pair for pair in itertools.combinations(measured, 2) if _differ(*(measured[name] for name in pair))]
    wrong = [
        pair for pair in pairs if (predicted[pair[0]] < predicted[pair[1]]) != (measured[pair[0]] < measured[pair[1]])
    ]
    return len(pairs), [" / ".join(pair) for pair in wrong]


def _differ(one: float, other: float) -> bool:
    return max(one, other) > (1 + DIFFERENCE) * min(one, other)


def main() -> None:
    chosen = options(__doc__, runs=3, only=list(TASKS))
    seconds = 6.0 if chosen.quick else 10.0
    predicted: dict[tuple[str, str], list[float]] = {}
    measured: dict[tuple[str, str], list[float]] = {}
    with scratch() as folder:
        for _ in range(chosen.runs):
            for task in chosen.only:
                plans = predict(task, folder)
                for name, plan in plans.items():
                    predicted.setdefault((task, name), []).append(float(str(plan["step_s"])))
                    overrides = [str(word) for word in plan["overrides"]]  # type: ignore[attr-defined]
                    step_s = measure(task, overrides, int(str(plan["workers"])), seconds)
                    measured.setdefault((task, name), []).append(step_s)
                    said = f"predicted {1e3 * predicted[task, name][-1]:.2f} ms, {1e3 * step_s:.2f} ms"
                    print(f"{Path(task).stem}, {name}: {said}", flush=True)
    rows = [_row(task, predicted, measured) for task in chosen.only]
    write("plan_order", rows, chosen.results)


def _row(task: str, predicted: dict[tuple[str, str], list[float]], measured: dict[tuple[str, str], list[float]]) -> Row:
    said = {name: statistics.median(values) for (of, name), values in predicted.items() if of == task}
    was = {name: statistics.median(values) for (of, name), values in measured.items() if of == task}
    number, wrong = count_order(said, was)
    share = 1.0 - len(wrong) / number
    plans = {
        name: {"predicted": spread(predicted[task, name]), "measured": spread(measured[task, name])} for name in was
    }
    listed = ", ".join(
        f"{name} {1e3 * said[name]:.1f}/{1e3 * was[name]:.1f}" for name in sorted(was, key=lambda name: was[name])
    )
    note = f"{len(was)} plans, {number} pairs; predicted/measured ms: {listed}" + (
        f"; wrong: {', '.join(wrong)}" if wrong else ""
    )
    runs = {"ours": spread([share]), "plans": plans}
    name = (
        f"`shoal plan`, {Path(task).stem}: pairs of plans in the measured order, of those that differ by more than 20%"
    )
    return Row(name, "", share, None, None, None, 1.0, "value", "higher", runs, note)


if __name__ == "__main__":
    main()
