"""TRL's side of benchmarks.agents, in .venv-trl: gradients by its own losses, and its trainer on the task of `letters`.

    python -m benchmarks.peers.trl_grpo gradients FOLDER MODEL    # of the batches in FOLDER, to FOLDER/NAME.trl.pt
    python -m benchmarks.peers.trl_grpo train MODEL THREADS       # speaks to its parent by lines (benchmarks/talk.py)

A batch is a JSON file (benchmarks/agents/gradient.py). A child that trains takes `{"steps": N, "reward": R, "seed": S,
"timeout_s": T}` and says what was measured: N steps, or fewer, once the answers of 4 steps, 256, have a mean of R.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from benchmarks.agents.letters import CLIP, GROUP_SIZE, GROUPS, LEARNING_RATE, MAX_TOKENS, REWARDS, tasks
from benchmarks.talk import commands, say

WINDOW = 4  # steps
CPU = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True}


def compute_advantages(rewards: torch.Tensor, is_rloo: bool) -> torch.Tensor:
    """As `_generate_and_score_completions` of either trainer does for groups of one size."""
    if is_rloo:
        return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def make_inputs(rows: list[dict[str, Any]], dtype: torch.dtype, pad: int, is_rloo: bool) -> dict[str, Any]:
    """What TRL's collation makes of these rows: prompts padded at their left, completions at their right."""
    prompts = [row["tokens"][: row["prompt"]] for row in rows]
    completions = [row["tokens"][row["prompt"] :] for row in rows]
    longest_prompt, longest = max(map(len, prompts)), max(map(len, completions))

    def pad_right(values: list[list[Any]], filler: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in values], dtype=dtype)

    left = [longest_prompt - len(each) for each in prompts]
    advantages = torch.zeros(len(rows), dtype=dtype)
    groups = [row["group"] for row in rows]
    for group in set(groups):
        chosen = torch.tensor([each == group for each in groups])
        rewards = torch.tensor([row["reward"] for row in rows], dtype=dtype)[chosen]
        advantages[chosen] = compute_advantages(rewards, is_rloo)
    old = pad_right([row["logprobs"][row["prompt"] :] for row in rows], 0.0, dtype)
    tool_mask = pad_right([row["trains"][row["prompt"] :] for row in rows], 0, torch.int64)
    return {
        "prompt_ids": torch.tensor([[pad] * n + each for n, each in zip(left, prompts, strict=True)]),
        "prompt_mask": torch.tensor([[0] * n + [1] * len(each) for n, each in zip(left, prompts, strict=True)]),
        "completion_ids": pad_right(completions, pad, torch.int64),
        "completion_mask": pad_right([[1] * len(each) for each in completions], 0, torch.int64),
        "advantages": advantages,
        "num_items_in_batch": tool_mask.sum(),
        **({"old_logps": old.sum(1)} if is_rloo else {"old_per_token_logps": old, "tool_mask": tool_mask}),
    }


def compute_gradients(batch: dict[str, Any], model: str, dtype: torch.dtype, folder: str) -> dict[str, torch.Tensor]:
    """The gradient of each parameter by the loss of the batch's trainer, summed over its micro-batches."""
    is_rloo = batch["algorithm"] == "rloo"
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    settings = {"output_dir": folder, "num_generations": 2, "per_device_train_batch_size": 2, "beta": 0.0, **CPU}
    settings |= {"epsilon": CLIP, "gradient_checkpointing": False}
    data = Dataset.from_list([{"prompt": "a"}])
    trainer: Any = (RLOOTrainer if is_rloo else GRPOTrainer)(
        network, len, (RLOOConfig if is_rloo else GRPOConfig)(**settings), data, processing_class=tokenizer
    )
    trainer.current_gradient_accumulation_steps = 1
    network.train()
    inputs = make_inputs(batch["rows"], dtype, tokenizer.pad_token_id, is_rloo)
    bounds = [*range(0, len(batch["rows"]), batch["micro_batch"] or len(batch["rows"])), len(batch["rows"])]
    for begin, end in itertools.pairwise(bounds):
        part = {name: each[begin:end] if each.ndim else each for name, each in inputs.items()}
        loss = trainer._compute_loss(network, part)
        (loss * (end - begin) / len(batch["rows"]) if is_rloo else loss).backward()
    return {name: each.grad.double() for name, each in network.named_parameters()}


class Watch(TrainerCallback):
    """Notes rewards, and ends the training."""

    def __init__(self, reward: float | None, timeout_s: float) -> None:
        self._target, self._timeout_s = reward, timeout_s
        self.points: list[tuple[int, float, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began_s, self.began_cpu_s = time.monotonic(), time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "reward" not in (logs or {}):
            return
        seconds = time.monotonic() - self.began_s
        self.points.append((state.global_step, round(seconds, 3), logs["reward"]))
        is_reached = self._target is not None and len(self.points) >= WINDOW and self.reward >= self._target
        control.should_training_stop = is_reached or seconds > self._timeout_s

    @property
    def reward(self) -> float:
        last = [reward for *_, reward in self.points[-WINDOW:]]
        return sum(last) / len(last)


def train(model: str, asked: dict[str, Any]) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    groups, size = asked.get("groups", GROUPS), asked.get("group_size", GROUP_SIZE)
    made = [tasks(asked["seed"] * 1_000_000 + number) for number in range(groups * asked["steps"])]
    rows = [{"prompt": [{"role": "user", "content": task["prompt"]}], **task["data"]} for task in made]

    def reward(completions: Any, answer: Any, **_: Any) -> list[float]:
        compute = REWARDS[asked.get("rewards", "letters")]
        return [compute(each[0]["content"], right) for each, right in zip(completions, answer, strict=True)]

    watch = Watch(asked.get("reward"), asked["timeout_s"])
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=groups * size,
            num_generations=size,
            max_completion_length=asked.get("max_tokens", MAX_TOKENS),
            temperature=1.0,
            learning_rate=asked.get("learning_rate", LEARNING_RATE),
            lr_scheduler_type="constant",
            weight_decay=0.0,
            epsilon=CLIP,
            max_steps=asked["steps"],
            logging_steps=1,
            beta=0.0,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            seed=asked["seed"],
            **CPU,
        )
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        data = Dataset.from_list(rows)
        trainer = GRPOTrainer(network, reward, settings, data, processing_class=tokenizer, callbacks=[watch])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    target = asked.get("reward")
    return {
        "steps": watch.points[-1][0],
        "seconds": watch.points[-1][1],
        "reward": watch.reward,
        "is_reached": target is not None and watch.reward >= target,
        "points": watch.points,
        "cpu_s": time.process_time() - watch.began_cpu_s,
        "loss": settings.loss_type,
    }


def main(what: str, *words: str) -> None:
    if what == "gradients":
        folder, model = Path(words[0]), words[1]
        for path in sorted(folder.glob("*.json")):
            batch = json.loads(path.read_text())
            for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
                gradients = compute_gradients(batch, model, dtype, str(folder / "trl"))
                torch.save(gradients, path.with_suffix(f".{name}.pt"))
        return
    model, threads = words
    torch.set_num_threads(int(threads))
    say(ready=True)
    for asked in commands():
        say(**train(model, asked))


if __name__ == "__main__":
    main(*sys.argv[1:])
