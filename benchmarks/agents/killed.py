"""A run whose parts are killed, and its books: shared by `benchmarks.agents.kills` and `benchmarks.agents.frameworks`.

The run is that of `shoal run agents`, in a child, with an endpoint that samples. Its books are read from the file of
its sessions, in one transaction, while it goes on: for each version of the weights, the tokens that were sampled are
those that were learnt, that wait, and that were dropped for a reason.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import msgspec

from benchmarks.children import OUR_PYTHON, Child, ChildFailed
from shoal.libs.agents.sessions.store import FILE_NAME
from shoal.libs.agents.sessions.token_tree import Turn

START_S, WINDOW = 900.0, 256
TITLES = {"gateway": "ray::GatewayWorker", "learner": "ray::LearnerWorker", "replica": "ray::ServeReplica"}
REASONS = {
    *("failed", "expired", "evicted", "group_incomplete", "no_signal", "cancelled", "sampling", "truncated"),
    *("stale_admission", "stale_consumption", "learner_crash", "gateway_crash", "shutdown"),
}


class KilledRun:
    """`shoal run agents`, from its first line until `close`. fields: of its spec"""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.home = folder / "home"
        words = [f"{name}={value}" for name, value in fields.items()]
        command = [OUR_PYTHON, "-m", "shoal", "run", "agents", *words]
        environment = {"SHOAL_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        self.child = Child(command, folder, environment, goodbye_s=0.0)
        self.url = ""

    def wait(self) -> None:
        """Until sessions are opened, and the replicas answer."""
        deadline_s = time.monotonic() + START_S
        while not self.url:
            if time.monotonic() > deadline_s or self.child.process.poll() is not None:
                raise ChildFailed(f"the run did not start: {self.child.last_words()}")
            found = re.search(r"sessions are opened at (\S+)/shoal/v1/sessions", "\n".join(self.child.output))
            self.url = found[1] if found else ""
            time.sleep(0.5)

    @property
    def folder(self) -> Path:
        (found,) = (self.home / "runs").iterdir()
        return found

    def find(self, part: str) -> list[int]:
        """The processes of a part that are there."""
        return [each.pid for each in self.child.processes(TITLES[part])]

    def require_running(self) -> None:
        if self.child.process.poll() is not None:
            raise ChildFailed(f"the run has ended: {self.child.last_words(40)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.child.close()


class Killer:
    """Kills one part after the other with SIGKILL, in an order that its seed gives: of those that are there one that
    was killed least. find: the processes of each part"""

    def __init__(self, seed: int, find: Mapping[str, Callable[[], list[int]]]) -> None:
        self._random, self._find = random.Random(seed), find
        self.num = Counter[str]()

    def kill(self) -> str:
        """The part that was killed; "" where none was there."""
        for part in sorted(self._find, key=lambda each: (self.num[each], self._random.random())):
            if pids := self._find[part]():
                with suppress(ProcessLookupError):
                    os.kill(self._random.choice(pids), 9)
                self.num[part] += 1
                return part
        return ""


@dataclass(frozen=True)
class Books:
    """What the file of sessions says at one moment.

    sessions: (id, state, why, whether it trains, step, whether it has an advantage, reward) in the order of their ends
    turns:    of each session, (id of the answer, turn)
    steps:    the state of each
    counts:   tokens by what became of them, and by version
    """

    sessions: list[tuple[str, str, str, bool, int | None, bool, float | None]]
    turns: Mapping[str, list[tuple[str, Turn]]]
    steps: Mapping[int, str]
    counts: Mapping[str, Counter[int]]


def read_books(folder: Path) -> Books:
    turns = defaultdict[str, list[tuple[str, Turn]]](list)
    counts = defaultdict[str, Counter[int]](Counter)
    sessions = []
    with closing(sqlite3.connect(f"file:{folder / FILE_NAME}?mode=ro", uri=True, isolation_level=None)) as database:
        database.execute("BEGIN")
        for session, reply, packed in database.execute("SELECT session, reply, turn FROM turns ORDER BY number"):
            turns[session].append((reply, msgspec.msgpack.decode(packed, type=Turn)))
        for what, version, num in database.execute("SELECT what, version, tokens FROM counts"):
            counts[what][version] = num
        steps = dict(database.execute("SELECT number, state FROM steps"))
        columns = "id, state, why, opening, step, advantage, ending"
        for row in database.execute(f"SELECT {columns} FROM sessions ORDER BY end_time"):
            session, state, why, opening, step, advantage, ending = row
            is_training = json.loads(opening).get("purpose", "train") == "train"
            reward = None if ending is None else json.loads(ending).get("reward")
            sessions.append((session, state, why, is_training, step, advantage is not None, reward))
    return Books(sessions, turns, steps, counts)


def count_waiting(books: Books) -> Counter[int]:
    """Tokens by version that are neither learnt nor dropped: of sessions that no step has, and of steps that the
    learner is not through with."""
    waiting = Counter[int]()
    for session, _, _, is_training, step, has_advantage, _ in books.sessions:
        for _, turn in books.turns.get(session, ()):
            is_queued = step is not None and books.steps[step] == "open" and has_advantage and turn.trains
            if is_training and (step is None or is_queued):
                waiting += _count_spans(turn)
    return waiting


def find_errors(books: Books) -> list[str]:
    """Where the accounts do not hold; each token that is neither learnt nor waits has a reason."""
    written = Counter[int]()
    for _, turn in itertools.chain.from_iterable(books.turns.values()):
        written.update(_count_spans(turn))
    errors = [
        f"no such reason: {what}" for what in books.counts if what not in {*REASONS, "sampled", "learned", "eval"}
    ]
    waiting, sampled = count_waiting(books), books.counts.get("sampled", Counter())
    for version in written | sampled:
        gone = sum(each[version] for what, each in books.counts.items() if what != "sampled")
        found = sampled[version], written[version], waiting[version] + gone
        if len({*found}) > 1:
            errors.append(f"version {version}: sampled {found[0]}, recorded {found[1]}, accounted for {found[2]}")
    silent = [each[0] for each in books.sessions if each[1] in ("failed", "expired", "evicted") and not each[2]]
    return errors + [f"session {each} has ended without a reason" for each in silent]


def _count_spans(turn: Turn) -> Counter[int]:
    counts = Counter[int]()
    for version, num in turn.spans:
        counts[version] += num
    return counts


def read_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """What agents have noted; the last line of one that was killed may be a part."""
    lines = [line for path in paths for line in path.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def follow_reward(books: Books) -> list[tuple[int, float]]:
    """The steps of the learner, and the mean reward of the last sessions then."""
    ended = [(step, reward) for *_, step, _, reward in books.sessions if step is not None and reward is not None]
    rewards = [reward for _, reward in ended]
    return [
        (step, fmean(rewards[number - WINDOW : number]))
        for number, (step, _) in enumerate(ended, 1)
        if number >= WINDOW
    ]
