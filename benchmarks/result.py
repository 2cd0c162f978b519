"""What a benchmark found, and where it came from: rows in benchmarks/results/NAME.json, from which tables are made.

Called by every benchmark and by `table`. Owns the file's format, the comparison with the bar, and the description of
machine, versions and commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import distributions
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from benchmarks.children import AGENTS, DEEPRIVER, DYNET, GODOT, PEERS, ROOT, SBX, SOM, TORCHFT, TORCHRL, TRL

RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / "build" / "benchmarks"  # not committed
OUR_PACKAGES = ("shoal", "torch", "ray", "numpy", "pyzmq", "gymnasium", "msgspec", "safetensors")
PEER_PACKAGES = ("torch", "ray", "numpy", "gymnasium", "stable_baselines3", "mosec", "bentoml", "litserve", "uvicorn")

Better = Literal["higher", "lower"]
BarKind = Literal["ratio", "value"]


@dataclass(frozen=True)
class Row:
    """One comparison. `ours` and `peer` are medians of the runs; `ratio` is ours / peer.

    bar, bar_kind: what must be reached, by the ratio or by our own value; None when the row only informs
    runs:          "ours" and "peer", each with values, min, median and max
    note:          what a reader must know to read the numbers right
    """

    name: str
    unit: str
    ours: float
    peer: float | None
    peer_name: str | None
    ratio: float | None
    bar: float | None
    bar_kind: BarKind | None
    better: Better
    runs: dict[str, dict[str, Any]]
    note: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    commit: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    command: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without a bar."""
        number = self.ratio if self.bar_kind == "ratio" else self.ours
        if self.bar is None or number is None:
            return None
        return number >= self.bar if self.better == "higher" else number <= self.bar


def compare(
    name: str,
    unit: str,
    better: Better,
    ours: Sequence[float],
    peer: Sequence[float] = (),
    peer_name: str | None = None,
    bar: float | None = None,
    bar_kind: BarKind | None = None,
    note: str = "",
) -> Row:
    """The row for these runs."""
    runs = {"ours": spread(ours)} | ({"peer": spread(peer)} if peer else {})
    mine = runs["ours"]["median"]
    theirs = runs["peer"]["median"] if peer else None
    ratio = mine / theirs if theirs else None
    return Row(name, unit, mine, theirs, peer_name, ratio, bar, bar_kind, better, runs, note)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """The values, and what they say together."""
    return {
        "values": [round(value, 6) for value in values],
        "min": min(values),
        "median": statistics.median(values),
        "max": max(values),
    }


def write(name: str, rows: Sequence[Row], folder: Path) -> Path:
    """Print the rows and write FOLDER/NAME.json."""
    for row in rows:
        print(describe(row), flush=True)
    path = save(name, rows, folder)
    print(f"written to {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}", flush=True)
    return path


def save(
    name: str,
    rows: Sequence[Row],
    folder: Path,
    device: Mapping[str, Any] = MappingProxyType({}),
    about: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write FOLDER/NAME.json.

    device: of the machine, what `machine` does not say: its GPU
    about:  further fields of the file, which tables leave out
    """
    origin = {
        "versions": versions(),
        "machine": {**machine(), **device},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**about, "rows": [asdict(row) | origin for row in rows]}, indent=1) + "\n")
    return path


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else sys.argv[0]


def read(folder: Path = RESULTS) -> dict[str, list[Row]]:
    """The rows that were written, by the name of their file."""
    known = {one.name for one in fields(Row)}
    return {
        path.stem: [
            Row(**{key: value for key, value in row.items() if key in known})
            for row in json.loads(path.read_text())["rows"]
        ]
        for path in sorted(folder.glob("*.json"))
    }


def describe(row: Row) -> str:
    """One line for a terminal."""
    line = f"{row.name}: {number(row.ours)} {row.unit}"
    if row.peer is not None:
        line += f", {row.peer_name} {number(row.peer)}, ratio {number(row.ratio)}"
    if row.bar is not None:
        sign = "≥" if row.better == "higher" else "≤"
        line += f" | bar: {row.bar_kind} {sign} {number(row.bar)}: {'met' if row.met else 'MISSED'}"
    return line


def number(value: float | None) -> str:
    """Three digits that matter, thousands with commas."""
    if value is None:
        return "-"
    if value and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def versions() -> dict[str, str]:
    """Of Python, of our packages, and of the peers' as `peers/NAME`."""
    found = {"python": platform.python_version(), "linux": platform.release()}
    found |= _installed(sys.path, OUR_PACKAGES)
    alone = (
        (DYNET, ("dynet38",)),
        (TORCHFT, ("torchft",)),
        (SBX, ("sbx_rl", "jax")),
        (TORCHRL, ("torchrl", "tensordict")),
        (DEEPRIVER, ("deep_river", "river")),
        (SOM, ("fastersom", "minisom", "river")),
        (GODOT, ("godot_rl", "stable_baselines3")),
        (TRL, ("trl", "transformers")),
        (AGENTS, ("openai_agents", "langgraph", "langchain_openai", "smolagents", "openai", "anthropic")),
    )
    for folder, names in ((PEERS, PEER_PACKAGES), *alone):
        site = [str(path) for path in folder.glob("lib/python*/site-packages")]
        found |= {f"peers/{name}": version for name, version in _installed(site, names).items()}
    return found


def _installed(path: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    known = {one.metadata["Name"].replace("-", "_").lower(): one.version for one in distributions(path=list(path))}
    return {name: known[name] for name in names if name in known}


def machine() -> dict[str, Any]:
    """Processor, cores that may be used, memory, and the share of their time that the host gave to others."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "stolen": round((stolen_s() - _STOLEN_S) / (time.monotonic() - _BEGAN_S) / (os.cpu_count() or 1), 4),
    }


def stolen_s() -> float:
    """Processor time that this machine wanted and its host gave to others, since it runs; 0 where nobody says."""
    fields_of_all = next((line.split() for line in _lines("/proc/stat") if line.startswith("cpu ")), [])
    return float(fields_of_all[8]) / os.sysconf("SC_CLK_TCK") if len(fields_of_all) > 8 else 0.0


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


_STOLEN_S, _BEGAN_S = stolen_s(), time.monotonic()  # when a benchmark begins


def commit() -> dict[str, Any]:
    """The revision that was measured, and whether files other than results differ from it."""
    changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!README.md")
    return {"revision": _git("rev-parse", "HEAD") or "unknown", "dirty": bool(changed)}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def options(
    description: str | None,
    runs: int,
    only: Sequence[str] = (),
    minutes: float | None = None,
    rounds: int | None = None,
    before: str = "",
    sides: Sequence[str] = (),
) -> argparse.Namespace:
    """The command line that all benchmarks share: `runs`, `quick`, `results`; for some, which peers, or how long.

    sides: of a benchmark that can be resumed, those that can be measured alone
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", "--seeds", type=int, default=None, help=f"repetitions, of each side and seed from 0 (default {runs})"
    )
    parser.add_argument("--quick", action="store_true", help="one short run, to see that it works; not a measurement")
    parser.add_argument("--results", type=Path, default=None, help="the folder for NAME.json")
    if minutes is not None:
        parser.add_argument("--minutes", type=float, default=minutes, help=f"how long (default {minutes:g})")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of a population (default {rounds})")
    if before:
        parser.add_argument("--before", default=before, help=f"the commit of the other side (default {before})")
    if only:
        parser.add_argument("--only", nargs="+", choices=only, default=list(only), help="the peers to run")
    if sides:
        parser.add_argument("--resume", action="store_true", help="measure no attempt again that is beside the results")
        parser.add_argument("--sides", nargs="+", choices=sides, default=list(sides), help="those that are measured")
    chosen = parser.parse_args()
    chosen.runs = chosen.runs or (1 if chosen.quick else runs)
    chosen.results = chosen.results or (QUICK_RESULTS if chosen.quick else RESULTS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every child is ended
    return chosen
