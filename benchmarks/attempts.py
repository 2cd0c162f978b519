"""Attempts to solve a task with the defaults of a spec, and their outcomes in a file beside the results.

Called by `algorithms` and `learning_anywhere`. Each outcome is a line of JSON in FOLDER/attempts.jsonl, appended once
it is known, so that a benchmark that was interrupted can be resumed, and what both measure is measured once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ours.rl import actors_of, run_of
from benchmarks.result import commit
from benchmarks.time_to_solve import Solved, read_outcome
from shoal.rl.spec import RLSpec

NAME = "attempts.jsonl"
NUM_POINTS = 100  # of a curve that are kept
SIDES = ("ours", "sb3")


class Caps(NamedTuple):
    """What ends an attempt: seconds, and environment steps of all actors together."""

    seconds: float
    steps: int


class Ours(NamedTuple):
    """A run of ours with the defaults of the spec.

    pause_factor:  after each batch the learner sleeps so many times as long as it took
    pause_s:       and so many seconds
    batches_ahead: in the queue and on their way to it, in place of the platform's number; 0: that one
    """

    algorithm: str
    env: str
    target: float
    num_actors: int = 4
    pause_factor: float = 0.0
    pause_s: float = 0.0
    batches_ahead: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        return f"env={self.env}", f"algorithm={self.algorithm}"

    @property
    def settings(self) -> dict[str, Any]:
        """All that the outcome depends on: a default that changes makes other settings."""
        return {**self._asdict(), "spec": RLSpec().override(self.words).model_dump(mode="json")}


def solve(run: Ours, seed: int, folder: Path, caps: Caps) -> Solved:
    """One attempt, with gateway and learner in one process and actors in processes of their own."""
    words = [*run.words, f"learner.seed={seed}"]
    setting = {name: getattr(run, name) for name in ("pause_factor", "pause_s", "batches_ahead")}
    with (
        run_of("local", folder, words=words, target_return=run.target, **setting) as (child, address),
        actors_of(folder, run.num_actors, ["--connect", address, "--env", run.env]),
    ):
        said = child.ask(caps.seconds + 30.0, do="solved", timeout_s=caps.seconds, steps=caps.steps)
        return read_outcome(said, caps.seconds)


class Attempts:
    """The outcomes so far, by task, side, seed and settings.

    sides:  what is measured; outcomes of another side are taken from the file
    resume: outcomes of these sides are taken from there, too; else each is measured anew, once
    """

    def __init__(self, folder: Path, sides: Collection[str] = SIDES, resume: bool = False) -> None:
        self._path, self._sides = folder / NAME, sides
        self._known: dict[tuple[str, str, int, str], tuple[Solved, Caps]] = {}
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            said = json.loads(line)
            if resume or said["side"] not in sides:
                points = tuple((steps, mean) for steps, mean in said["points"])
                key = (said["task"], said["side"], said["seed"], said["settings"])
                outcome = Solved(said["seconds"], said["steps"], said["solved"], points, said["lag"])
                self._known[key] = outcome, Caps(*said["caps"])

    def find(
        self, task: str, side: str, seed: int, settings: Mapping[str, Any], caps: Caps, measure: Callable[[], Solved]
    ) -> Solved | None:
        """The outcome of this attempt, by `measure` where there is none that counts; None if its side is not measured.

        One that did not solve the task counts where it had as much time and as many steps.
        """
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        key = (task, side, seed, digest)
        found, had = self._known.get(key, (None, caps))
        is_enough = found is not None and (found.solved or (had.seconds >= caps.seconds and had.steps >= caps.steps))
        if not is_enough:
            found = None
            if side in self._sides:
                found = measure()
                self._known[key] = found, caps
                self._append(key, found, caps)
        if found is not None:
            verdict = "solved" if found.solved else "NOT solved"
            again = ", known" if is_enough else ""
            print(
                f"{task}, {side}, seed {seed}: {verdict}, {found.seconds:.2f} s, {found.steps:,} steps{again}",
                flush=True,
            )
        return found

    def _append(self, key: tuple[str, str, int, str], found: Solved, caps: Caps) -> None:
        points = found.points[:: max(1, len(found.points) // NUM_POINTS)]
        line = {**dict(zip(("task", "side", "seed", "settings"), key, strict=True)), **found._asdict()}
        line |= {"points": points, "caps": caps, "commit": commit()["revision"]}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def count_ours(found: Collection[Solved], caps: Caps) -> list[Solved]:
    """With both caps for each attempt that did not solve it. A peer's count with what they took, a lower bound."""
    return [one if one.solved else one._replace(seconds=caps.seconds, steps=caps.steps) for one in found]
