"""Losses with a denominator of their own, under every word of `parallel` and `sync`, beside one process.

    python -m benchmarks.split_losses [--quick]

Class-weighted cross entropy, rows of which most have no label, and a GPT-2 of transformers on padded texts. Each is
trained for five steps of SGD in one process, and in each other way; a row has the largest relative difference of a
weight, norm of the difference over norm of the weight. Local SGD averages after each step, which for SGD is the same.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import safetensors.torch

from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.result import Row, compare, options, write

TASKS = Path(__file__).parent / "ours" / "split_loss_tasks.py"
BARS = {False: 1e-5, True: 1e-12}
WAYS: dict[str, tuple[int, str]] = {  # processes of torchrun, and overrides
    "four micro-batches": (1, "parallel.accumulate=4"),
    "ddp": (2, "parallel=ddp"),
    "ddp, two micro-batches": (2, "parallel=ddp parallel.accumulate=2"),
    "fsdp": (2, "parallel=fsdp"),
    "fsdp, four micro-batches": (2, "parallel=fsdp parallel.accumulate=4"),
    "tensor": (2, "parallel=tensor"),
    "pipeline": (2, "parallel=pipeline parallel.micro_batches=4"),
    "hybrid": (4, "parallel.data=2 parallel.pipeline=2 parallel.micro_batches=2"),
    "parameter server": (1, "workers=2 sync.kind=parameter_server sync.servers=2"),
    "local SGD, every step": (1, "workers=2 sync.kind=local_sgd sync.every=1"),
    "elastic": (1, "workers=[1,2]"),
}
NOT_DOUBLE = ("parameter server", "local SGD, every step", "elastic")  # they exchange float32
NOT_GPT2 = ("tensor", "pipeline", "hybrid")  # it returns an object, and its layers are of a class of its own


def train(task: str, is_double: bool, num_processes: int, overrides: str) -> dict[str, object]:
    """The weights after five steps."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    words = [*(torchrun if num_processes > 1 else []), "-m", "shoal.train", f"task={TASKS}:{task}", "batch_size=16"]
    words += ["stop.steps=5", "loader.shuffle=false", "threads=1", *overrides.split()]
    with scratch() as folder:
        environment = {"SHOAL_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        words += ["args.is_double=true"] if is_double else []
        subprocess.run(
            ["/usr/bin/env", *(f"{name}={value}" for name, value in environment.items()), OUR_PYTHON, *words],
            cwd=ROOT, check=True, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        [path] = folder.rglob("model.safetensors")
        return safetensors.torch.load_file(path)


def main() -> None:
    chosen = options(__doc__, runs=1)
    rows: list[Row] = []
    for task in ("ClassWeighted",) if chosen.quick else ("ClassWeighted", "FewLabels", "PaddedGPT2"):
        for is_double, bar in BARS.items():
            whole = train(task, is_double, 1, "")
            for way, (num_processes, overrides) in WAYS.items():
                if (is_double and way in NOT_DOUBLE) or (task == "PaddedGPT2" and way in NOT_GPT2):
                    continue
                found = train(task, is_double, num_processes, overrides)
                assert found.keys() == whole.keys()
                worst = max(float((found[name] - each).norm() / each.norm()) for name, each in whole.items())
                title = f"{task}{', float64' if is_double else ''}, {way}: largest relative difference of a weight"
                rows.append(compare(title, "", "lower", [worst], bar=bar, bar_kind="value"))
                print(f"{title}: {worst:.2e}", flush=True)
    write("split_losses", rows, chosen.results)


if __name__ == "__main__":
    main()
