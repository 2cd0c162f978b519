"""The recipe `jobs/trees.py` end to end, beside the same network computed by recursion; and its waits for plans.

    python -m benchmarks.tree_recipe [--runs N] [--quick]

A step is: read 128 trees, plan them, forward, backward, clip, Adam; on one thread, whose processor time counts, so that
other work on the machine does not. The recursion computes the same trees with the same weights node by node, by the
equations of the paper, and gets them without a plan; it takes turns with the recipe in this process. Its gradients are
compared first. The share of waiting is that of the recipe as it is, with a worker process that plans ahead:
`Loader.wait_s` over the time of the steps, which is right only where the worker has a core of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.result import Row, compare, options, write
from shoal.data import Data, Loader, LoaderSpec
from shoal.libs.trees.syntax_tree import TreeLSTM
from shoal.train.task import Task, make_task

BATCH_SIZE = 128
CLIP_NORM, LEARNING_RATE = 1.0, 5e-3
OUR_STEPS, THEIR_STEPS, WAIT_STEPS = 20, 1, 100

Sample = tuple[np.ndarray, ...]  # parents, tokens, kinds, is_hidden, is_commonest


def main() -> None:
    chosen = options(__doc__, runs=5)
    torch.set_num_threads(1)
    task = make_task("trees", {"files": 20 if chosen.quick else 200})
    data = task.data()
    check_gradients(task, data)
    ours, theirs = [], []
    for _ in range(chosen.runs):
        ours.append(measure_recipe(task, data, 2 if chosen.quick else OUR_STEPS).trees_per_cpu_s)
        theirs.append(measure_recursion(task, data, THEIR_STEPS))
    ahead = [measure_recipe(task, data, 5 if chosen.quick else WAIT_STEPS, num_workers=1) for _ in range(chosen.runs)]
    handed = statistics.median(each.handed_share for each in ahead)
    note = f"{BATCH_SIZE} trees a step, with reading, planning and Adam; one thread, its processor time"
    waiting = f"one worker process of the loader plans ahead; taking over its batches is {handed:.2%} of processor time"
    rows: list[Row] = [
        compare(
            *("syntax-tree recipe, end to end", "trees/s", "higher", ours, theirs, "recursion", 8.0, "ratio"),
            note=f"{note}; {data.train.forest.describe()}",
        ),
        compare(
            *("syntax-tree recipe: share of a step that waits for plans", "%", "lower"),
            *([100 * each.waited_share for each in ahead], (), None, 1.0, "value", waiting),
        ),
    ]
    write("tree_recipe", rows, chosen.results)


class Measured(NamedTuple):
    """waited_share: of the time, for a batch. handed_share: of the thread's processor time, to take over batches."""

    trees_per_cpu_s: float
    waited_share: float
    handed_share: float


def measure_recipe(task: Task, data: Data, num_steps: int, num_workers: int = 0) -> Measured:
    model, step = make_stepper(task)
    with Loader(
        data.train, batch_size=BATCH_SIZE, spec=LoaderSpec(workers=num_workers), collate=data.collate, seed=1
    ) as loader:
        batches = chain.from_iterable(repeat(loader))  # epoch after epoch
        for _ in range(3):
            batch = next(batches)
            step(task.loss(model(*task.inputs(batch)), batch))
        waited_s, handed_s = loader.wait_s, 0.0
        began_s, cpu_began_s, thread_began_s = time.perf_counter(), time.process_time(), time.thread_time()
        for _ in range(num_steps):
            before_s = time.thread_time()
            batch = next(batches)
            handed_s += time.thread_time() - before_s
            step(task.loss(model(*task.inputs(batch)), batch))
        cpu_s, thread_s = time.process_time() - cpu_began_s, time.thread_time() - thread_began_s
        waited_share = (loader.wait_s - waited_s) / (time.perf_counter() - began_s)
        return Measured(num_steps * BATCH_SIZE / cpu_s, waited_share, handed_s / thread_s)


def measure_recursion(task: Task, data: Data, num_steps: int) -> float:
    """Trees per second of the processor."""
    model, step = make_stepper(task)
    with Loader(data.train, batch_size=BATCH_SIZE, collate=list, seed=1) as loader:
        batches = chain.from_iterable(repeat(loader))
        began_s = time.process_time()
        for _ in range(num_steps):
            step(compute_loss(model, next(batches)))
        return num_steps * BATCH_SIZE / (time.process_time() - began_s)


def make_stepper(task: Task) -> tuple[TreeLSTM, Callable[[Tensor], None]]:
    torch.manual_seed(0)
    model: Any = task.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()

    return model, step


def compute_loss(model: TreeLSTM, samples: Sequence[Sample]) -> Tensor:
    """The recipe's loss, tree by tree and node by node."""
    losses = []
    for parents, tokens, kinds, is_hidden, _ in samples:
        logits = model.head(torch.cat(list(compute_states(model, parents, tokens))))  # [N, C]
        where = torch.from_numpy(np.flatnonzero(is_hidden))
        losses.append(nn.functional.cross_entropy(logits[where], torch.from_numpy(kinds).long()[where]))
    return torch.stack(losses).mean()


def compute_states(model: TreeLSTM, parents: np.ndarray, tokens: np.ndarray) -> Iterator[Tensor]:
    """h [1, H] of each node, in the order of the nodes: equations 2 to 8 of arXiv:1503.00075."""
    cell: Any = model.rnn.cell
    H = cell.hidden_size
    of_f, of_gates = cell.below.weight.split([H, 3 * H])
    x_of = cell.input(model.token(torch.from_numpy(tokens).long())).split(1)  # views once: slices would cost more
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            children[parent].append(node)
    states: list[Any] = [None] * len(children)

    def compute(node: int) -> tuple[Tensor, Tensor]:
        f_x, gates = x_of[node].split([H, 3 * H], 1)
        kept: Tensor | float = 0.0
        if children[node]:
            h, c = (torch.cat(each) for each in zip(*map(compute, children[node]), strict=True))
            gates = gates + nn.functional.linear(h.sum(0, keepdim=True), of_gates)
            kept = (torch.sigmoid(f_x + nn.functional.linear(h, of_f)) * c).sum(0, keepdim=True)
        i, o, u = gates.chunk(3, 1)
        memory = torch.sigmoid(i) * torch.tanh(u) + kept
        states[node] = torch.sigmoid(o) * torch.tanh(memory), memory
        found: tuple[Tensor, Tensor] = states[node]
        return found

    compute(0)
    return (h for h, _ in states)


def check_gradients(task: Task, data: Data) -> None:
    """Raises AssertionError if recipe and recursion do not compute the same."""
    model, _ = make_stepper(task)
    np.random.seed(0)
    samples = [data.train[index] for index in range(8)]
    assert data.collate is not None
    batch = data.collate(samples)
    pairs = []
    for loss in (task.loss(model(batch), batch), compute_loss(model, samples)):
        pairs.append(torch.autograd.grad(loss, list(model.parameters())))
    for (name, _), ours, theirs in zip(model.named_parameters(), *pairs, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6), name


if __name__ == "__main__":
    main()
