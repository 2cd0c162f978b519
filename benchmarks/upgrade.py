"""A release beside the one before: a run that the older one has begun, and its actors at a gateway of the newer one.

    python -m benchmarks.upgrade [--before COMMIT]

The older release is the commit that wrote the newest archive of tests/written, checked out beside this one, with the
same packages. Training: the older one is interrupted in the middle, the newer one resumes; its losses are those of a
run that the newer one has made alone, to the bit. Games: `python -m shoal.actor` of the older release plays at a run of
the newer one for half a minute; what it sends is learnt.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shoal.runs
from benchmarks.chaos.campaigns import TOY
from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.result import compare, options, write
from shoal.runs import Run

STEPS = 200
WORDS = (f"task={TOY}", 'args={"step_s": 0.05, "count": 2048}', f"stop.steps={STEPS}", "log_every_steps=1", "threads=1")
TIMEOUT_S = 600.0


def find_before() -> str:
    command = ["git", "log", "-1", "--format=%H", "--", "tests/written"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def check_out(commit: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def start(tree: Path, home: Path, module: str, *words: str, **variables: str) -> subprocess.Popen[bytes]:
    """A program of the release at `tree`."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "platform"), "SHOAL_HOME": str(home), **variables}
    log = (home.parent / f"{time.monotonic_ns()}.log").open("wb")
    return subprocess.Popen([OUR_PYTHON, "-m", module, *words], env=environment, cwd=tree, stdout=log, stderr=log)


def find_run(home: Path, number: int) -> Run:
    """The run that was begun as the `number`th one, from 0."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        folders = sorted((home / "runs").glob("*")) if (home / "runs").is_dir() else []
        if len(folders) > number:
            return shoal.runs.load(folders[number].name)
        time.sleep(0.5)
    raise TimeoutError("no run has begun")


def wait_for_step(home: Path, step: int) -> Run:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        run = find_run(home, 0)
        if run.latest().get("train/step", 0) >= step:
            return run
        time.sleep(0.2)
    raise TimeoutError(f"step {step} was not reached")


def read_losses(run: Run) -> dict[int, float]:
    losses: dict[int, float] = run.metrics()["train/loss"].dropna().to_dict()
    return losses


def train_over(before: Path, home: Path) -> tuple[int, int]:
    """Steps whose losses differ, and of how many."""
    older = start(before, home, "shoal", "run", "train", *WORDS, "--plain")
    run = wait_for_step(home, STEPS // 3)
    older.send_signal(signal.SIGINT)
    older.wait(TIMEOUT_S)
    assert run.reload().latest()["train/step"] < STEPS, "it was over before it was interrupted"
    newer = start(ROOT, home, "shoal", "run", "train", f"resume={run.id}", "--plain")
    assert newer.wait(TIMEOUT_S) == 0, "it was not resumed"
    alone = start(ROOT, home, "shoal", "run", "train", *WORDS, "--plain")
    assert alone.wait(TIMEOUT_S) == 0
    losses, expected = read_losses(run.reload()), read_losses(find_run(home, 1))
    return sum(losses.get(step) != loss for step, loss in expected.items()), len(expected)


def play_over(before: Path, home: Path, seconds: float) -> dict[str, Any]:
    """The accounts of a run whose actor is of the older release."""
    words = ("actor_learner", "target_return=1000", f"max_wall_s={seconds:g}", "--plain")
    newer = start(ROOT, home, "shoal", "run", *words)
    run = find_run(home, 0)
    gateway: list[str] = []
    while not gateway:
        gateway = [each.address for each in run.reload().endpoints() if each.kind == "gateway"]
        time.sleep(0.5)
    token = (home / "token").read_text().strip()
    actor = start(before, home, "shoal.actor", "--connect", gateway[0], "--env", "CartPole-v1", SHOAL_TOKEN=token)
    newer.wait(TIMEOUT_S)
    assert actor.wait(TIMEOUT_S) == 0, "the actor of the older release did not end with the run"
    (accounts,) = [details for _, details in run.reload().list_events("accounting")]
    return accounts


def main() -> None:
    chosen = options(__doc__, runs=1, before=find_before())
    with check_out(chosen.before) as before, scratch() as folder:
        for name in ("training", "game"):
            (folder / name).mkdir()
        os.environ["SHOAL_HOME"] = str(folder / "training" / "home")
        differing, num = train_over(before, folder / "training" / "home")
        os.environ["SHOAL_HOME"] = str(folder / "game" / "home")
        accounts = play_over(before, folder / "game" / "home", 10.0 if chosen.quick else 30.0)
    dropped = {reason: each for reason, each in accounts["dropped"].items() if each and reason != "shutdown"}
    title = f"a release after {chosen.before[:9]}"
    rows = [
        compare(f"{title}: steps of a resumed run with another loss", "", "lower", [differing], bar=0, bar_kind="value",
                note=f"of {num}"),
        compare(f"{title}: segments of an older actor that are not learnt", "", "lower", [sum(dropped.values())], bar=0,
                bar_kind="value", note=f"of {accounts['received']:,}"),
    ]  # fmt: skip
    write("upgrade", rows, chosen.results)


if __name__ == "__main__":
    main()
