"""The table of docs/large-models.md: the memory of a device under each plan, as `shoal plan` counts it.

    python -m benchmarks.what_fits      # prints the table, in Markdown

Trains a decoder (bf16 with Adam, a context of 2048) with four sequences for each device of 80 GB.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.children import OUR_PYTHON, Child, ChildFailed, scratch
from benchmarks.large_plan import HARDWARE, TASK

MODELS = {"1.3 B": (2048, 24), "6.7 B": (4096, 32), "13 B": (5120, 40)}  # width and blocks
HOSTS = (1, 8)
DEVICES, SEQUENCES = 8, 4
SHOWN = ("one device", "ddp", "fsdp", "hybrid", "fsdp x tensor", "ddp x pipeline")


def plan(task: Path, width: int, depth: int, hosts: int) -> dict[str, str]:
    """GiB of a device under each plan of SHOWN, of several of a kind the least; in italics what does not fit."""
    hardware = [f"hosts={hosts}", *HARDWARE[1:]]
    words = [f"args={{width: {width}, depth: {depth}}}", f"batch_size={hosts * DEVICES * SEQUENCES}"]
    command = [
        OUR_PYTHON,
        "-m",
        "shoal",
        "plan",
        f"{task}:Text",
        *words,
        "parallel.precision=bf16",
        *hardware,
        "--json",
    ]
    with Child(command, task.parent, {"SHOAL_HOME": str(task.parent)}) as child:
        if child.wait(540.0):
            raise ChildFailed(child.last_words())
        child.close()
        found = json.loads("\n".join(child.output))["plans"]
    least: dict[str, str] = {}
    for each in sorted(found, key=lambda each: each["memory_bytes"] or 0):
        name = " x ".join(part.partition("=")[0] for part in each["plan"].partition(",")[0].split(" x "))
        if each["is_applicable"]:
            mark = "" if each["is_possible"] else "*"
            least.setdefault(name, f"{mark}{each['memory_bytes'] / 2**30:,.0f}{mark}")
    return least


def main() -> None:
    print(f"| parameters | devices | {' | '.join(SHOWN)} |\n|---|---|{'---:|' * len(SHOWN)}")
    with scratch() as folder:
        task = folder / "text_task.py"
        task.write_text(TASK)
        for name, (width, depth) in MODELS.items():
            for hosts in HOSTS:
                cells = plan(task, width, depth, hosts)
                shown = " | ".join(cells.get(each, "-") for each in SHOWN)
                print(f"| {name} | {hosts} x {DEVICES} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
