"""Bytes of a version: what has changed in bf16 weights, beside all of them; and adapters, beside the merged model.

    python -m benchmarks.agents.deltas [--quick]

SmolLM2-135M takes 20 steps of GRPO with AdamW, or as many as come in twelve minutes, from parts of this project's
documents, with random rewards and its own log-probabilities; both rates at the same time. After each step the weights
are published in bf16, as a run with `algorithm.weights=bf16` does: the bytes that travel from the version before, and
the share of the weights that differ from it. What is read of them is compared with the weights, bit for bit. The
seconds are of a processor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from benchmarks.agents.learning import GGUF
from benchmarks.children import ROOT
from benchmarks.result import Row, compare, options, write
from shoal.extend.rl import LearnerSpec, RLSpec
from shoal.extend.train import make_task
from shoal.libs.agents.algorithm import TextPolicyGradient
from shoal.libs.agents.baselines import compute_advantages
from shoal.libs.agents.config import GRPOConfig, describe_tokens
from shoal.libs.agents.model import CAUSAL_LM, open_pretrained
from shoal.libs.hf.source import find_folder
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner import model_arrays
from shoal.weights import WeightSnapshot
from shoal.weights.deltas import WeightDelta
from shoal.wire import Segment

RATES, STEPS, GROUP, LENGTH, PROMPT = (1e-5, 1e-6), 20, 2, 16, 4
LIMIT_S = 720.0
MIB = 2**20


def make_algorithm(**fields: Any) -> tuple[TextPolicyGradient, list[int]]:
    """And the tokens of the documents."""
    config = GRPOConfig(pretrained=str(find_folder(str(GGUF))), **fields)
    model = open_pretrained(config)
    learner = LearnerSpec(device="cpu", publish_interval_s=0)
    spec = RLSpec(algorithm=config, learner=learner)  # type: ignore[arg-type]
    text = "\n".join(each.read_text() for each in sorted((ROOT / "docs").glob("*.md")))
    return TextPolicyGradient(spec, describe_tokens(model.num_tokens, LENGTH)), model.tokenizer.encode(text[:200_000])


def make_batch(algorithm: TextPolicyGradient, tokens: list[int], number: int) -> ExperienceBatch:
    """A group of segments, as if the present weights had sampled them."""
    rewards = np.random.default_rng(number).normal(size=GROUP)
    advantages = compute_advantages(rewards, "group_mean_std")

    def make(log_mu: np.ndarray) -> ExperienceBatch:
        segments = []
        for index in range(GROUP):
            first = (number * GROUP + index) * LENGTH
            row = np.array(tokens[first : first + LENGTH + 1], np.int32)
            places = np.arange(LENGTH + 1)
            extras = {
                "trains": (places >= PROMPT) & (places < LENGTH),
                "advantage": np.full(LENGTH + 1, advantages[index], np.float32),
            }
            gained = np.zeros(LENGTH, np.float32)
            gained[-1] = rewards[index]
            versions = np.full(LENGTH, algorithm.version, np.int64)
            segments.append(Segment(row, row[1:], gained, log_mu[index], versions, terminated=True, extras=extras))
        return algorithm.prepare(ExperienceBatch.from_segments(1, segments))

    log_pi = algorithm.compute_log_ratios(make(np.zeros((GROUP, LENGTH), np.float32)))
    return make(log_pi.reshape(GROUP, LENGTH))


def publish(algorithm: TextPolicyGradient) -> WeightSnapshot:
    return WeightSnapshot.of(algorithm.version, algorithm.normalizer.fold(model_arrays(algorithm.model)))


def take_steps(rate: float, num_steps: int) -> Iterator[dict[str, float]]:
    algorithm, tokens = make_algorithm(learning_rate=rate, weights="bf16")
    algorithm.version = 1
    before, end_s = publish(algorithm), time.monotonic() + LIMIT_S
    for number in range(num_steps):
        list(algorithm.update(make_batch(algorithm, tokens, number)))
        algorithm.version += 1
        newest = publish(algorithm)
        began_s = time.process_time()
        delta = WeightDelta.between(before, newest)
        written_s = time.process_time()
        assert delta is not None
        read = delta.apply(before)
        read_s = time.process_time()
        assert read.payload == newest.payload
        size_bytes, words = newest.size_bytes, [np.frombuffer(each.payload, "<u2") for each in (before, newest)]
        found = {
            "changed": float(np.count_nonzero(words[0] != words[1]) / len(words[0])),
            "bytes": len(delta.changes) / size_bytes,
            "mib": len(delta.changes) / MIB,
            "full_mib": size_bytes / MIB,
            "write_s": written_s - began_s,
            "read_s": read_s - written_s,
        }
        print(f"rate {rate:g}, step {number + 1}: {found}", flush=True)
        yield found
        before = newest
        if time.monotonic() > end_s:
            return


def compare_rate(rate: float, num_steps: int) -> Row:
    steps = list(take_steps(rate, num_steps))
    sizes = sorted(each["mib"] for each in steps)
    times = [statistics.median(each[name] for each in steps) for name in ("write_s", "read_s")]
    note = (
        f"{len(steps)} versions of {steps[0]['full_mib']:.0f} MiB each: what has changed has {sizes[0]:.2f} to "
        f"{sizes[-1]:.2f} MiB, is found in {times[0]:.2f} s and applied in {times[1]:.2f} s; bit-equal"
    )
    mine, theirs = [each["bytes"] for each in steps], [each["changed"] for each in steps]
    name = f"SmolLM2-135M in bf16, lr {rate:g}: bytes of a version, of those of all weights"
    return compare(name, "", "lower", mine, theirs, "share of changed weights", 1.0, "ratio", note)


def compare_adapters() -> Row:
    """Of rank 8, on the layers that peft chooses."""
    adapters, _ = make_algorithm(lora={"rank": 8})
    with torch.device("meta"):
        plain = make_task(CAUSAL_LM, GRPOConfig(pretrained=str(find_folder(str(GGUF)))).task_args).model()
    whole = sum(each.nbytes for each in plain.state_dict().values())
    name = "SmolLM2-135M, LoRA of rank 8: a version in float32"
    return compare(name, "MiB", "lower", [publish(adapters).size_bytes / MIB], [whole / MIB], "the merged model")


def main() -> None:
    chosen = options(__doc__, runs=1)
    find_folder(str(GGUF))  # makes it once
    with ProcessPoolExecutor(len(RATES), mp_context=get_context("spawn")) as both:
        rows = [*both.map(compare_rate, RATES, repeat(3 if chosen.quick else STEPS))]
    write("agents_deltas", [*rows, compare_adapters()], chosen.results)


if __name__ == "__main__":
    main()
