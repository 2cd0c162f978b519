"""What `shoal plan` takes for a model that this machine could not hold, and whether the memory it counts is right.

    python -m benchmarks.large_plan [--runs N] [--quick]

A decoder of 6.7 billion parameters (width 4096, 32 blocks) on 8 hosts of 8 devices, in a process of its own: seconds
after its imports, and the most that it holds. Then a small twin (width 256, 8 blocks): the memory of a rank as counted
on fake tensors, beside torch's FSDPMemTracker on the same model and plan, and beside what the probe of a real run of
two ranks measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.children import OUR_PYTHON, ROOT, Child, ChildFailed, scratch
from benchmarks.result import Row, compare, options, spread, write
from shoal.cost import MEASURED
from shoal.cost.cost_table import relative_error
from shoal.cost.step_profiler import NUM_TIMED, NUM_WARM_UP

HARDWARE = (
    *("hosts=8", "devices=8", "network=400Gbit", "device_bandwidth=300GB", "device_memory=80GB"),
    *("device_flops=400TFLOP", "device=cuda"),
)
LARGE = ("batch_size=256", "parallel.precision=bf16")
TWIN = ("args.width=256", "args.depth=8", "args.context=128", "device=cpu", "threads=1", "batch_size=8")
PLANS = {"single": 1, "ddp": 2, "fsdp": 2}
TASK = """
import torch
from torch import nn
from shoal.data import Data
from shoal.models.decoder import Decoder
from shoal.train import Task

class Text(Task):
    def __init__(self, *, width: int = 4096, depth: int = 32, context: int = 2048) -> None:
        self.width, self.depth, self.context = width, depth, context

    def model(self):
        return Decoder(32_000 if self.width > 1000 else 1000, self.context, self.width, self.depth, heads=32)

    def data(self):
        tokens = torch.zeros(256, self.context, dtype=torch.int64)
        return Data(torch.utils.data.TensorDataset(tokens, tokens))

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())
"""
PLAN = """
import json, resource, sys, time
from shoal.libs.planning.hardware import HardwareSpec
from shoal.libs.planning.planner import rank_plans
from shoal.train.launch.overrides import spec_from_overrides
from shoal.train.task import make_task

words, hardware = json.loads(sys.argv[1])
began_s = time.perf_counter()
spec = spec_from_overrides(words)
found = rank_plans(make_task(spec.task, spec.args), spec, HardwareSpec().override(hardware))
seconds = time.perf_counter() - began_s
number = {"plans": len(found), "fit": sum(each.is_possible for each in found)}
peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes, **number}))
"""
COUNT = """
import json, sys
from shoal.libs.planning.predict.fake_plan import read_plan_on_fake_tensors
from shoal.train.launch.overrides import spec_from_overrides
from shoal.train.task import make_task

spec = spec_from_overrides(json.loads(sys.argv[1]))
task = make_task(spec.task, spec.args)
print(json.dumps(read_plan_on_fake_tensors(task, spec).runs[0].values))
"""
TRACK = """
import json, sys
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from shoal.cost.measure.collective_bytes import assume_cuda
from shoal.libs.planning.predict.fake_process_group import SimulatedRanks, fake_world
from shoal.cost.fake_tensors import use_fake_tensors
from shoal.data.loader import load_first_batch
from shoal.parallel.build import parallelize
from shoal.train.launch.overrides import spec_from_overrides
from shoal.train.optim.optimizers import make_optimizer
from shoal.train.task import make_task

spec = spec_from_overrides(json.loads(sys.argv[1]))
task, degrees, cpu = make_task(spec.task, spec.args), spec.resolve_dims(), torch.device("cpu")
batch = load_first_batch(task.data(), spec.batch_size // degrees.data)
with use_fake_tensors() as mode, fake_world(0, degrees.workers, cpu, SimulatedRanks()) as world:
    batch = mode.from_batch(batch)
    model = parallelize(task.model(), task, spec.parallel, degrees, world, batch)
    optimizer = make_optimizer(task, spec.optimizer, [each for _, each in model.named_parameters()])
    model.train_step(batch, 0)
    optimizer.step()
    for _, each in model.named_parameters():
        each.grad = None
    tracker = FSDPMemTracker(model.module, optimizer)
    tracker.track_inputs(tuple(batch))
    with tracker:
        model.train_step(batch, 1)
        optimizer.step()
    peak = tracker.get_tracker_snapshot("peak")
print(json.dumps({"peak_bytes": max(each["Total"] for each in peak.values())}))
"""


def run(program: str, argument: object, folder: Path) -> dict[str, float]:
    """What a process prints last, as JSON."""
    with Child([OUR_PYTHON, "-c", program, json.dumps(argument)], folder, {"SHOAL_HOME": str(folder)}) as child:
        if child.wait(540.0):
            raise ChildFailed(child.last_words())
        child.close()
        found: dict[str, float] = json.loads(child.output[-1])
        return found


def measure(words: list[str], workers: int, home: Path) -> dict[str, float]:
    """What the probe of a real run measures."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    stop = f"stop={{steps: {NUM_WARM_UP + NUM_TIMED + 1}}}"
    subprocess.run(
        [sys.executable, *launcher, "-m", "shoal.train", *words, stop, "name=large-plan"],
        cwd=ROOT,
        env={**os.environ, "SHOAL_HOME": str(home), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=540.0,
        stdout=subprocess.DEVNULL,
    )
    os.environ["SHOAL_HOME"] = str(home)
    import shoal.runs

    found: dict[str, float] = shoal.runs.load("latest").last_events()[MEASURED]
    return found


def main() -> None:
    chosen = options(__doc__, runs=3)
    with scratch() as folder:
        path = folder / "text_task.py"
        path.write_text(TASK)
        words = [f"task={path}:Text", *LARGE, HARDWARE[-1]]
        planned = [run(PLAN, [words, list(HARDWARE[:-1])], folder) for _ in range(chosen.runs)]
        twin = [f"task={path}:Text", *TWIN]
        sharded = [*twin, "parallel=fsdp", "workers=4"]
        counted = run(COUNT, [*sharded, "device=cuda"], folder)["memory_peak"]
        tracked = run(TRACK, sharded, folder)["peak_bytes"]
        judged = {}
        for plan, workers in PLANS.items():
            words = [*twin, f"parallel={plan}", f"workers={workers}"]
            before, after = run(COUNT, words, folder), measure(words, workers, folder / plan)
            judged[plan] = [before["memory_peak"], after["memory_peak"]]
            print(f"{plan}: {judged[plan]}, off by {relative_error(*judged[plan]):+.1%}", flush=True)
    write("large_plan", [*_cost_rows(planned), _tracker_row(counted, tracked), _run_row(judged)], chosen.results)


def _cost_rows(planned: list[dict[str, float]]) -> list[Row]:
    number = f"{planned[0]['plans']:.0f} plans, of which {planned[0]['fit']:.0f} fit 80 GB"
    seconds, gib = [each["seconds"] for each in planned], [each["peak_bytes"] / 2**30 for each in planned]
    name = "`shoal plan`, 6.7 B parameters, 8 hosts of 8 devices"
    return [
        compare(f"{name}: after imports", "s", "lower", seconds, bar=10.0, bar_kind="value", note=number),
        compare(f"{name}: peak memory", "GiB", "lower", gib, bar=2.0, bar_kind="value", note=number),
    ]


def _tracker_row(counted: float, tracked: float) -> Row:
    """The bar holds both ways."""
    missed = abs(relative_error(counted, tracked))
    runs = {"ours": spread([missed]), "bytes": {"counted": counted, "tracked": tracked}}
    note = f"fsdp over 4, a twin of width 256: counted {counted / 2**20:.1f} MiB, tracked {tracked / 2**20:.1f} MiB"
    name = "memory of a rank on fake tensors: how far from torch's FSDPMemTracker"
    return Row(name, "", missed, None, None, None, 0.1, "value", "lower", runs, note)


def _run_row(judged: dict[str, list[float]]) -> Row:
    misses = [abs(relative_error(*both)) for both in judged.values()]
    listed = ", ".join(f"{plan} {relative_error(*both):+.1%}" for plan, both in judged.items())
    name = "memory of a rank on fake tensors: how far from a run's, the worst of three plans"
    return Row(name, "", max(misses), None, None, None, 0.1, "value", "lower", {"ours": spread(misses)}, listed)


if __name__ == "__main__":
    main()
