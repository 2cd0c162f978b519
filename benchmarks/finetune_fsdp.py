"""A step of LoRA on SmolLM2-135M under fsdp over two ranks, beside one that gathers the frozen base once.

    python -m benchmarks.finetune_fsdp [--runs N] [--quick]

A step gathers the base for its forward pass and again for its backward pass. Its peer retains what the first one
gathered (parallel.reshard_after_forward=false), which takes memory for the whole base on each rank. Both take turns of
two steps within the same processes, on the batches of `benchmarks.finetune`, one thread each. A number is the median
time of a rank's step, in a run; the note has the same of its processor time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FSDPModule

from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.finetune import BATCH, GGUF, LENGTH, RANK, RATE, WARM_UP
from benchmarks.result import compare, options, write
from shoal.libs.hf.source import find_folder
from shoal.libs.hf.tasks import CausalLM
from shoal.train.callback import Callback, TrainingState

SIDES = ("ours", "peer")
NOTES_VARIABLE = "FINETUNE_NOTES"  # the file for what the steps took
Seconds = dict[str, list[tuple[float, float]]]  # of a side's steps: of the clock, and of the processor


class _Turns(Callback):
    """Lets FSDP2 gather the base twice a step in two steps, once in the next two, and notes what each has taken."""

    def __init__(self) -> None:
        self._took: Seconds = {side: [] for side in SIDES}
        self._since_s = (0.0, 0.0)

    def on_step(self, state: TrainingState) -> None:
        now_s = time.perf_counter(), time.process_time()
        num_counted = state.step - WARM_UP
        if num_counted > 0:
            took_s = now_s[0] - self._since_s[0], now_s[1] - self._since_s[1]
            self._took[SIDES[(num_counted - 1) // 2 % 2]].append(took_s)
            if state.is_first:
                Path(os.environ[NOTES_VARIABLE]).write_text(json.dumps(self._took))
        model = state.model[0]
        assert isinstance(model, FSDPModule)
        model.set_reshard_after_forward(SIDES[max(num_counted, 0) // 2 % 2] == "ours")
        model.set_reshard_after_forward(False, recurse=False)  # as it is by itself: the root retains what it gathers
        self._since_s = time.perf_counter(), time.process_time()


class TurnLM(CausalLM):
    """The turns of a rank."""

    def callbacks(self) -> Sequence[Callback]:
        return [_Turns()]


def measure(args: dict[str, Any], steps: int, folder: Path) -> Seconds:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shoal.train"]
    words += [f"task={TurnLM.__module__}:TurnLM", "parallel=fsdp", "workers=2", "device=cpu", f"batch_size={BATCH}"]
    words += [f"args.{name}={value}" for name, value in args.items()]
    words += [f"args.lora.rank={RANK}", f"args.lora.alpha={2 * RANK}", "optimizer.name=adamw", "clip_norm=1.0"]
    words += [f"optimizer.learning_rate={RATE}", f"stop.steps={WARM_UP + steps}", "check_loss=false"]
    notes = folder / "turns.json"
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {"OMP_NUM_THREADS": "1", NOTES_VARIABLE: str(notes), "SHOAL_HOME": str(folder / "home"), "PYTHONPATH": paths}
    done = subprocess.run(
        [OUR_PYTHON, *words], cwd=folder, env=os.environ | env, check=False, capture_output=True, text=True, timeout=500
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    took: Seconds = json.loads(notes.read_text())
    return took


def main() -> None:
    chosen = options(__doc__, runs=3)
    steps = 8 if chosen.quick else 24
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}  # medians of each run
    with scratch() as folder:
        data = Path(folder) / "texts.jsonl"
        words = "the quick brown fox jumps over a lazy dog near the river bank while birds sing " * 20
        data.write_text("".join(json.dumps({"text": f"{number} {words}"}) + "\n" for number in range(BATCH * steps)))
        args = {"model": str(find_folder(str(GGUF))), "data": str(data), "max_length": LENGTH, "truncate": True}
        for _ in range(chosen.runs):
            for side, took in measure(args, steps, Path(folder)).items():
                clock_s, processor_s = (statistics.median(each) for each in zip(*took, strict=True))
                found[side].append((clock_s, processor_s))
                print(f"{side}: {clock_s:.3f} s, {processor_s:.3f} s of a processor", flush=True)
    ours, theirs = ([1e3 * clock_s for clock_s, _ in found[side]] for side in SIDES)
    shares = [mine[1] / other[1] for mine, other in zip(found["ours"], found["peer"], strict=True)]
    note = f"median of {steps // 2} steps; {BATCH} x {LENGTH} tokens, float32; processor time of a rank: ratio "
    note += f"{statistics.median(shares):.3f}, from {min(shares):.3f} to {max(shares):.3f}"
    name = "step of LoRA under fsdp, SmolLM2-135M, 2 ranks"
    row = compare(name, "ms", "lower", ours, theirs, "one gather a step", 1.1, "ratio", note)
    write("finetune_fsdp", [row], chosen.results)


if __name__ == "__main__":
    from benchmarks import finetune_fsdp  # the Task is found by its module

    finetune_fsdp.main()
