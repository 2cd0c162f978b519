"""Updates a second of a learner's algorithm on the GPU, beside the CPU, from recorded random segments.

An update is a step of the optimizer; the batch comes as a learner takes it, in host memory. A small perceptron for
four numbers, and the convolutions for four frames of 84 x 84 bytes. On the CPU torch has a thread for each core.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from benchmarks.gpu.turns import Setting, Turn, take_turns
from benchmarks.result import Row, compare
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire import ExperienceSpec, Segment

NUM_ACTIONS = 6
TITLES = {"numbers": "perceptron of 64 and 64", "frames": "convolutions on four frames of 84 x 84"}


def make_segment(experience: ExperienceSpec, length: int, draw: np.random.Generator) -> Segment:
    """Random steps of one episode."""
    shape = (length + 1, *experience.observation.shape)
    is_frame = experience.observation.dtype == "uint8"
    seen = draw.integers(0, 256, shape, np.uint8) if is_frame else draw.standard_normal(shape, np.float32).clip(-5, 5)
    return Segment(
        seen,
        draw.integers(0, NUM_ACTIONS, length),
        draw.standard_normal(length).astype(np.float32),
        np.full(length, -np.log(NUM_ACTIONS), np.float32),
        np.ones(length, np.int64),
    )


def make_side(algorithm: str, kind: str, device: str, setting: Setting) -> Turn:
    """A turn that is one update, of the same batch again and again."""
    hidden = (64, 64) if kind == "numbers" else (512,)
    spec = RLSpec(hidden=hidden).override([f"algorithm={algorithm}", f"learner.device={device}"])
    space = Box(-5, 5, (4,)) if kind == "numbers" else Box(0, 255, (4, 84, 84), np.uint8)
    experience = experience_spec(space, Discrete(NUM_ACTIONS), spec)
    num_segments, length = setting.choose(16, 2), setting.choose(64 if kind == "numbers" else 16, 4)
    draw = np.random.default_rng(0)
    batch = ExperienceBatch.from_segments(1, [make_segment(experience, length, draw) for _ in range(num_segments)])
    torch.manual_seed(0)
    subject = make_algorithm(spec, experience)

    def learn() -> Iterator[object]:
        while True:
            yield from subject.update(subject.prepare(batch))

    return partial(next, learn())


def measure(setting: Setting) -> Iterator[Row]:
    torch.set_num_threads(1 if setting.is_tiny else len(os.sched_getaffinity(0)))
    cases = list(itertools.product(("impala", "ppo"), TITLES))
    for index, (algorithm, kind) in enumerate(cases):
        sides = {"GPU": make_side(algorithm, kind, setting.device.type, setting)}
        sides["CPU"] = make_side(algorithm, kind, "cpu", setting)
        times = {"GPU": setting.choose(32, 1), "CPU": setting.choose(16 if kind == "numbers" else 1, 1)}
        found = take_turns(sides, setting.until(1 / (len(cases) - index)), times)
        rates = {name: [1e3 / ms for ms in taken] for name, taken in found.items()}
        name = f"updates of {algorithm}, {TITLES[kind]}, one GPU"
        note = f"{torch.get_num_threads()} threads on the CPU"
        yield compare(name, "updates/s", "higher", rates["GPU"], rates["CPU"], "CPU", note=note)
