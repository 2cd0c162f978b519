"""How long it takes from `shoal run` on a running cluster to the first step, beside Ray Train's TorchTrainer itself.

    python -m benchmarks.training_start [--runs N] [--quick]

A cluster of `shoal up`. Ours: `shoal run train` as typed, with everything that it does before (words, plan and data
checked by the job, record opened). The peer: the same small model with the same optimiser (making one loads PyTorch's
compiler) in a bare TorchTrainer on two workers, submitted as a Ray job in the same way. Both end with the first loss on
rank 0. What of the peer's time lies within `TorchTrainer.fit` is Ray Train's own share, the rest is Ray Jobs'.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path

from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.result import compare, options, write
from shoal.cluster import jobs
from shoal.cluster.attach import find_cluster

BAR_S = 1.0
TIMEOUT_S = 120.0
SHOAL = [OUR_PYTHON, "-c", "from shoal.cli import main; main()"]


def ours(folder: Path) -> float:
    """Seconds from the start of `shoal run` to the first loss."""
    file = folder / f"{uuid.uuid4().hex}.json"
    words = ["run", "train", "--plain", "task=benchmarks/ours/first_step_task.py:FirstStep", f"args.file={file}"]
    words += ["parallel=ddp", "workers=2", "batch_size=32", "stop.steps=2"]
    began_s = time.time()
    done = subprocess.run([*SHOAL, *words], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        sys.exit(f"shoal run failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(json.loads(file.read_text())["first_step"]) - began_s


def peer(folder: Path) -> tuple[float, float]:
    """Seconds from the job's submission to the first loss, and those of them within `fit`."""
    cluster = find_cluster()
    assert cluster is not None
    file = folder / f"{uuid.uuid4().hex}.json"
    began_s = time.time()
    job = jobs.submit(cluster, [OUR_PYTHON, str(ROOT / "benchmarks/ours/first_step.py"), str(file)])
    status = job.wait(TIMEOUT_S)
    if not file.exists():
        sys.exit(f"the peer's job ended as {status}:\n{job.read_logs()[-2000:]}")
    said = json.loads(file.read_text())
    return said["first_step"] - began_s, said["first_step"] - said["fit"]


def main() -> None:
    chosen = options(__doc__, runs=12)
    mine: list[float] = []
    theirs: list[float] = []
    within_fit: list[float] = []
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(folder / "home")
        subprocess.run([*SHOAL, "up"], check=True)
        try:
            for turn in range(chosen.runs):
                if turn % 2 == 0:  # who goes first finds a colder machine, most of all after `shoal up`
                    mine.append(ours(folder))
                whole, inner = peer(folder)
                theirs.append(whole)
                within_fit.append(inner)
                if turn % 2:
                    mine.append(ours(folder))
        finally:
            subprocess.run([*SHOAL, "down"], check=False)
    extra = [one - other for one, other in zip(mine, theirs, strict=True)]
    share = statistics.median(within_fit) / statistics.median(mine)
    note = f"of our median, {100 * share:.0f}% are Ray Train's own (within `fit`)"
    name = "from `shoal run` to the first step, 2 workers"
    rows = [
        compare(name, "s", "lower", mine, theirs, "TorchTrainer in a Ray job", note=note),
        compare(f"{name}, beyond the TorchTrainer", "s", "lower", extra, bar=BAR_S, bar_kind="value"),
    ]
    write("training_start", rows, chosen.results)


if __name__ == "__main__":
    main()
