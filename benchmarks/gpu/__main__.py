"""What a GPU gains and costs: sections in processes of their own, so that one which fails or hangs loses no other.

    python -m benchmarks.gpu [--only NAME ...] [--quick] [--device cpu] [--results FOLDER] [--check]

Needs torch with CUDA, no Ray; six minutes at most, two and a half with --quick. Each row stands as soon as its section
has said it, and a section's error is in the file beside the rows. On a CPU, sizes are tiny and nothing is measured: it
shows that all of it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECTIONS = {  # seconds of each: in full, and with --quick
    "ddp": (100.0, 45.0),
    "fsdp": (55.0, 30.0),
    "population": (50.0, 35.0),
    "trees": (35.0, 25.0),
    "learner": (40.0, 28.0),
    "predictor": (60.0, 30.0),
    "input": (45.0, 30.0),
    "checkpoint": (35.0, 25.0),
}
ROUNDS, QUICK_ROUNDS, TINY_ROUNDS = 15, 4, 1
TINY_S = 120.0  # of each, on a CPU, which may be slow
NEEDED = ("torch", "numpy", "psutil", "msgspec", "safetensors", "pydantic", "yaml", "click", "rich", "packaging")
OF_SECTIONS = {"learner": ("gymnasium", "zmq"), "predictor": ("uvicorn", "grpc", "google.protobuf")}


@dataclass(frozen=True)
class Outcome:
    """What became of a section. error: "" if it ran to its end"""

    rows: list[Any]
    seconds: float
    error: str = ""


def find_problem(device: str) -> str:
    """Why nothing can be measured here; "" if it can."""
    if missing := _find_missing(NEEDED):
        return f"{sys.executable} lacks {', '.join(missing)}: install what is missing, or name another Python"
    if device == "cpu":
        return ""
    import torch

    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        problem = f"there is no CUDA device here (torch {torch.__version__} of {sys.executable} {built})"
        return f"{problem}: name a Python whose torch sees one, or try the mechanics with --device cpu"
    return ""


def _find_missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is None]


def describe_device(device: str) -> dict[str, Any]:
    """The GPU, for the machine's description."""
    import torch

    if device == "cpu":
        return {"gpu": "none: tiny sizes on the CPU"}
    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name,
        "gpu_memory_gib": round(found.total_memory / 2**30, 1),
        "gpu_capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def run_section(name: str, device: str, rounds: int, seconds: float, folder: Path) -> Outcome:
    """Run a section in a process of its own for at most so many seconds."""
    from benchmarks.children import OUR_PYTHON, Child, ChildFailed
    from benchmarks.result import Row, describe

    began_s, rows = time.monotonic(), list[Any]()
    if missing := _find_missing(OF_SECTIONS.get(name, ())):
        return Outcome([], 0.0, f"{', '.join(missing)} is not installed")
    words = [OUR_PYTHON, "-m", "benchmarks.gpu.section", name, device, str(rounds), f"{began_s:.3f}", f"{seconds:g}"]
    # No network is needed, and a machine's own name may lead nowhere.
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    error = ""
    with Child(words, folder, environment, goodbye_s=0.0) as child:
        try:
            while not (said := child.answer(max(0.1, began_s + seconds - time.monotonic()))).get("done"):
                rows.append(Row(**said["row"]))
                print(f"   {describe(rows[-1])}", flush=True)
        except ChildFailed as failed:
            error = f"{str(failed).splitlines()[0]}\n{child.last_words(60)}"
    return Outcome(rows, time.monotonic() - began_s, error)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="the sections to run")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, nothing is measured"
    )
    parser.add_argument("--results", type=Path, default=None, help="the folder for gpu.json")
    parser.add_argument("--check", action="store_true", help="only say whether this machine has what it needs")
    return parser.parse_args()


def main() -> int:
    """Exit status 1 when a section failed, 2 when nothing could be measured."""
    chosen = read_options()
    if problem := find_problem(chosen.device):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if chosen.check:
        print(f"{sys.executable}: {describe_device(chosen.device)}")
        return 0
    from benchmarks.children import scratch
    from benchmarks.result import QUICK_RESULTS, RESULTS, save

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every child is ended
    is_tiny = chosen.device == "cpu"
    rounds = TINY_ROUNDS if is_tiny else QUICK_ROUNDS if chosen.quick else ROUNDS
    results = chosen.results or (QUICK_RESULTS if is_tiny else RESULTS)
    device, rows, sections = describe_device(chosen.device), list[Any](), dict[str, dict[str, Any]]()
    with scratch() as folder:
        for name in chosen.only:
            print(f"== {name}", flush=True)
            seconds = TINY_S if is_tiny else SECTIONS[name][chosen.quick]
            outcome = run_section(name, chosen.device, rounds, seconds, folder)
            print(f"== {name}: {outcome.error or 'done'} after {outcome.seconds:.1f} s", flush=True)
            rows += outcome.rows
            sections[name] = {"seconds": round(outcome.seconds, 1), "rows": len(outcome.rows), "error": outcome.error}
            path = save("gpu", rows, results, device, {"sections": sections})  # at once: this may be ended
    failed = [name for name, each in sections.items() if each["error"]]
    print(f"{len(rows)} rows are in {path}" + (f"; FAILED: {', '.join(failed)}" if failed else ""), flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
