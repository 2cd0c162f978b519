"""The whole suite, one stage after the other, as `make test` runs it. It ends by saying where the time went.

    python tests/suite.py            what each change runs
    python tests/suite.py soak       what is marked so, and takes too long for each change
    python tests/suite.py soak BASE  of that, the files whose subjects have changed since the commit BASE, and of the
                                     faults of faults.json those whose file or tests have
    python tests/suite.py keep       as the first, and writes tests/durations.json (see contracts/test_size.py)

A stage that fails does not hide the next; the exit status is that of the first that failed. `Durations` is loaded by
conftest.py: it leaves in $SUITE_DURATIONS how long each test took.
"""

import ast
import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DURATIONS = "SUITE_DURATIONS"
DURATIONS_FILE = ROOT / "tests" / "durations.json"
NUM_TESTS = 20
FAULTS_FILE, FAULTS_TEST = ROOT / "tests" / "faults.json", ROOT / "tests" / "contracts" / "test_faults.py"
MAX_FAULTS = 24  # that are tried of one change: each takes some seconds
# The second has three processes on two cores: one of them has the several hosts, which wait more than they compute. In
# the third, a Ray cluster per process. The folders whose tests take longest come first (see conftest.py).
STAGES = (
    "-n 2 --dist worksteal tests/unit",
    "-n 3 --dist loadgroup --no-loadscope-reorder"
    " tests/hosts tests/training tests/equivalence tests/serving tests/contracts tests/loop tests/libs tests/gpu",
    "-n 2 --dist loadgroup --no-loadscope-reorder tests/e2e tests/faults tests/ray",
)
CPU_GROUPS = ((Path("/sys/fs/cgroup/cpuacct"), "cpuacct.usage"), (Path("/sys/fs/cgroup"), "cpu.stat"))  # version 1, 2
PR_SET_CHILD_SUBREAPER = 36


class Durations:
    """A plugin that sums up what each test took, its fixtures included, in seconds of a process."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_tests = path, 0
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        self._num_tests += report.when == "call"

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps({"num_tests": self._num_tests, "seconds": self._seconds}))


@dataclass
class Stage:
    """One that has ended.

    cpu_s:   of all its processes, those of Ray included
    seconds: by test, of the process that ran it
    """

    words: str
    wall_s: float
    status: int
    cpu_s: float = 0.0
    is_interrupted: bool = False
    num_tests: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class ProcessorClock:
    """Counts the processor seconds of a command and of all that it starts.

    A control group counts every process, however it ends. Where none can be made, what this process has waited for
    counts: with orphans, but without a process whose parent ignores its end, as some of Ray's do.

    prefix: the words before the command
    """

    def __init__(self) -> None:
        self.prefix: list[str] = []
        self._usage: Path | None = None
        for root, name in CPU_GROUPS:
            group = root / f"shoal-suite-{os.getpid()}"
            with suppress(OSError):
                group.mkdir()
                (group / name).read_text()
                self.prefix, self._usage = (
                    ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"],
                    group / name,
                )
                break
        else:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._before_s = self._count_waited_s()

    def stop(self) -> float:
        if self._usage is None:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            return self._count_waited_s() - self._before_s
        text = self._usage.read_text().split("\n")[0]  # nanoseconds, or "usage_usec" and microseconds
        with suppress(OSError):  # a process has outlived the stage
            self._usage.parent.rmdir()
        return int(text.split()[-1]) / (1e6 if " " in text else 1e9)

    def _count_waited_s(self) -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime


def run(words: str) -> Stage:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "durations.json"
        clock = ProcessorClock()
        began_s = time.monotonic()
        is_interrupted = False
        command = [*clock.prefix, sys.executable, "-m", "pytest", *words.split()]
        with subprocess.Popen(command, cwd=ROOT, env=os.environ | {DURATIONS: str(path)}) as process:
            while True:
                try:
                    status = process.wait()
                    break
                except KeyboardInterrupt:  # pytest has it too, and ends what its tests have started
                    is_interrupted = True
        report = json.loads(path.read_text()) if path.exists() else {}
        return Stage(words, time.monotonic() - began_s, status, clock.stop(), is_interrupted, **report)


def describe(stages: Sequence[Stage]) -> str:
    """The seconds of each stage, by the clock and of processors, and of the tests and files that took longest."""
    total_s, cpu_s = (sum(getattr(stage, name) for stage in stages) for name in ("wall_s", "cpu_s"))
    lines = [f"where {total_s:.0f} s went, and {cpu_s:.0f} s of processors:"]
    for stage in stages:
        folders = " ".join(word for word in stage.words.split() if word.startswith("tests/"))
        failed = f", exit status {stage.status}" if stage.status else ""
        lines.append(f"{stage.wall_s:7.0f} s {stage.cpu_s:7.0f} s  {folders} ({stage.num_tests} tests{failed})")
    tests = sum((Counter(stage.seconds) for stage in stages), Counter[str]())
    lines.append("the tests that took longest, in seconds of a process:")
    lines += [f"{seconds:7.0f} s  {test}" for test, seconds in tests.most_common(NUM_TESTS)]
    return "\n".join(lines)


def keep(stages: Sequence[Stage]) -> None:
    """Write tests/durations.json: what the folders took, and every test of more than a second."""
    tests = sum((Counter(stage.seconds) for stage in stages), Counter[str]())
    folders: Counter[str] = Counter()
    for test, seconds in tests.items():
        folders["/".join(test.split("/")[:2])] += seconds
    durations = {
        "cpu_s": {stage.words.partition("tests/")[2].split()[0]: round(stage.cpu_s) for stage in stages},
        "folders_s": {name: round(seconds) for name, seconds in sorted(folders.items())},
        "tests_s": {name: round(seconds, 1) for name, seconds in tests.most_common() if seconds > 1},
    }
    DURATIONS_FILE.write_text(json.dumps(durations, indent=1) + "\n")


def files_about(changed: Sequence[str], files: Sequence[Path]) -> list[Path]:
    """Those of the test files that have changed, or that import a changed module themselves or through a helper."""
    modules = {name.removeprefix("platform/").removesuffix(".py").replace("/", ".") for name in changed}
    modules |= {Path(name).stem for name in changed if name.startswith("tests/") and name.count("/") == 1}

    def names_of(path: Path) -> set[str]:
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        helpers = {path.parent / f"{name}.py" for name in names} | {ROOT / "tests" / f"{name}.py" for name in names}
        return names.union(*(names_of(each) for each in helpers if each.exists() and each != path))

    return [path for path in files if str(path.relative_to(ROOT)) in changed or names_of(path) & modules]


def name_fault(fault: dict[str, Any]) -> str:
    return re.sub(r"\W+", "_", fault["fault"].lower()).strip("_")


def faults_about(changed: Sequence[str], faults: Sequence[dict[str, Any]]) -> list[str]:
    """The names of the faults whose file or tests have changed; of more than MAX_FAULTS so many, evenly."""
    chosen = [
        name_fault(each)
        for each in faults
        if {each["file"], *(test.partition("::")[0] for test in each["tests"])}.intersection(changed)
    ]
    return chosen[:: -(-len(chosen) // MAX_FAULTS) or 1]


def soak_stages(base: str | None = None) -> list[str]:
    """The stages of `make soak`; with a commit, what concerns the files that have changed since."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.soak" in path.read_text()]
    names: list[str] = []
    if base is not None:
        command = ["git", "diff", "--name-only", base, "HEAD"]
        changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        files.remove(FAULTS_TEST)
        files = files_about(changed, files)
        test = f"{FAULTS_TEST.relative_to(ROOT)}::test_a_fault_that_comes_back_is_found"
        names = [f"{test}[{each}]" for each in faults_about(changed, json.loads(FAULTS_FILE.read_text()))]
    names += [str(path.relative_to(ROOT)) for path in files]
    stages = []
    for words in STAGES:
        options, folders = words.partition(" tests/")[0], [word for word in words.split() if word.startswith("tests/")]
        if chosen := [name for name in names if name.startswith(tuple(f"{folder}/" for folder in folders))]:
            stages.append(" ".join(["-m soak", options, *chosen]))
    return stages


def main(stages: Sequence[str] = STAGES, keeps: bool = False) -> int:
    """The exit status of the first stage that failed, or 0."""
    ended: list[Stage] = []
    for words in stages:
        ended.append(run(words))
        if ended[-1].is_interrupted:
            break
    print(f"\n{describe(ended)}", flush=True)
    if keeps:
        keep(ended)
    return next((stage.status for stage in ended if stage.status), 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["soak"]:
        sys.exit(main(soak_stages(*sys.argv[2:])))
    sys.exit(main(keeps=sys.argv[1:] == ["keep"]))
