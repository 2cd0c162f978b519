"""The whole suite, one stage after the other, as `make test` runs it. It ends by saying where the time went.

    python tests/suite.py [soak]

With `soak`, what is marked so, and takes too long for each change. Stops at the first stage that fails, with that
stage's exit status. `Durations` is loaded by conftest.py: it leaves in $SUITE_DURATIONS how long the tests of each
file took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DURATIONS = "SUITE_DURATIONS"
NUM_FILES = 10
# The second has three processes on two cores: one of them has the several hosts, which wait more than they compute. In
# the third, a Ray cluster per process. The folders whose tests take longest come first (see conftest.py).
STAGES = (
    "-n 2 --dist worksteal tests/unit",
    "-n 3 --dist loadgroup --no-loadscope-reorder"
    " tests/hosts tests/training tests/equivalence tests/serving tests/contracts tests/loop tests/libs tests/gpu",
    "-n 2 --dist loadgroup --no-loadscope-reorder tests/e2e tests/faults tests/ray",
)

SOAK = tuple(f"-m soak {words}" for words in STAGES[1:])  # none of them is in tests/unit


class Durations:
    """A plugin that sums up what the tests of each file took, their fixtures included, in seconds of a process."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_tests = path, 0
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration
        self._num_tests += report.when == "call"

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps({"num_tests": self._num_tests, "seconds": self._seconds}))


@dataclass
class Stage:
    """One that has ended."""

    words: str
    wall_s: float
    status: int
    num_tests: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # by file


def run(words: str) -> Stage:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "durations.json"
        began_s = time.monotonic()
        command = [sys.executable, "-m", "pytest", *words.split()]
        with subprocess.Popen(command, cwd=ROOT, env=os.environ | {DURATIONS: str(path)}) as process:
            while True:
                try:
                    status = process.wait()
                    break
                except KeyboardInterrupt:  # pytest has it too, and ends what its tests have started
                    continue
        left = json.loads(path.read_text()) if path.exists() else {}
        return Stage(words, time.monotonic() - began_s, status, **left)


def describe(stages: Sequence[Stage]) -> str:
    """The seconds of each stage by the clock, and of the files that took longest."""
    lines = [f"where {sum(stage.wall_s for stage in stages):.0f} s went:"]
    for stage in stages:
        folders = " ".join(word for word in stage.words.split() if word.startswith("tests/"))
        lines.append(f"{stage.wall_s:7.0f} s  {folders} ({stage.num_tests} tests)")
    slowest = sum((Counter(stage.seconds) for stage in stages), Counter[str]()).most_common(NUM_FILES)
    lines.append("the files that took longest, in seconds of a process:")
    lines += [f"{seconds:7.0f} s  {file}" for file, seconds in slowest]
    return "\n".join(lines)


def main(stages: Sequence[str] = STAGES) -> int:
    """The exit status of the first stage that fails, or 0."""
    ended: list[Stage] = []
    for words in stages:
        ended.append(run(words))
        if ended[-1].status:
            break
    print(f"\n{describe(ended)}", flush=True)
    return ended[-1].status


if __name__ == "__main__":
    sys.exit(main(SOAK if sys.argv[1:] == ["soak"] else STAGES))
