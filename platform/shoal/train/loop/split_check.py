"""The check that a loss, or a metric, does not depend on how a batch is split: that of several samples is the mean of
each one's.

A loss that divides by something else than the number of samples would be trained on other gradients than in one
process, and a metric would depend on the batch size. Which losses do cannot be read from their code, so the check
compares numbers. A few samples show it only if they differ in what the loss divides by. So the check follows which
traits of samples it has seen to make no difference: missing labels (-100, negative, NaN), zeros, each of the first
classes. A batch with another trait is compared, too.

Called by the Trainer with every batch; `judge` is collective, and called where the ranks exchange signals.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.batch_tree import count_samples, has_own_samples, join_samples, take_samples, tensors_of
from shoal.errors import ConfigError, summarize_error
from shoal.parallel import ParallelModel, World
from shoal.parallel.loss import LOSS
from shoal.random_state import preserve_rng

NUM_SAMPLES = 6  # that are compared: each alone, and all together
MAX_GROUPS = 4  # of such samples, of one batch
MAX_DELAY = 4  # batches whose figures a device may still compute
TOLERANCE = 1e-4  # relative: a network rounds differently for another number of samples
NUM_ROUNDINGS = 4  # of a loss or a network in a type of less digits, as bf16
NUM_CLASSES = 32  # values of whole numbers that are told apart; beyond, as those of tokens, they are not
MANY = 1 << 18  # elements, as of pictures: their values are not told apart
LARGE, NUM_LARGE = 1 << 15, 64  # elements that are counted in so many batches, then in one of each doubling
IGNORED = -100.0

Measure = Callable[[Any], Mapping[str, Tensor]]


class Trait(NamedTuple):
    """What samples may differ in: how many elements of a tensor of the batch are so.

    leaf: the index of the tensor
    kind: a value of whole numbers, -1 for all negative ones; or a name of `_MARKS`
    """

    leaf: int
    kind: int | str


_MARKS: dict[str, Callable[[Tensor], Tensor]] = {
    "missing": torch.isnan,
    "ignored": lambda leaf: leaf == IGNORED,
    "negative": lambda leaf: leaf < 0,
    "zero": lambda leaf: leaf == 0,
    "varied": torch.nan_to_num,
}


class SplitCheck:
    """Refuses a loss or metrics that are no means over the samples of a batch.

    measure:     of a batch: [2] by name, numerator and denominator; or [5], as `ParallelModel.measure_loss`. Collective
    subject:     the method that gives a name, and its Task
    consequence: of a difference, and its remedy
    max_samples: the most that may be measured at once, if more than two
    tolerance:   relative; of the model's type

    Values that differ although the samples are the same cannot be compared, and pass.
    """

    def __init__(
        self,
        measure: Measure,
        world: World,
        subject: Callable[[str], tuple[str, str]],
        consequence: tuple[str, str],
        max_samples: int,
        tolerance: float = TOLERANCE,
    ) -> None:
        self._measure, self._world, self._subject, self._consequence = measure, world, subject, consequence
        self._num_samples, self._tolerance = min(NUM_SAMPLES, max(2, max_samples)), tolerance
        self._num_batches = 0
        self._told: dict[Trait, set[str]] = defaultdict(set)  # names, by the traits that make no difference to them
        self._names: set[str] = set()
        self._spread: dict[Trait, float] = defaultdict(float)  # the widest that was compared
        self._first: Any = None  # a sample of the first batch
        self._waiting: deque[tuple[Any, list[Tensor], list[Tensor], torch.cuda.Event | None]] = deque()
        self._chosen: list[tuple[Any, dict[Trait, Tensor]]] = []  # samples to compare, and the counts of their traits

    def watch(self, batch: Any) -> None:
        """Look at a batch that is trained on or evaluated."""
        if not count_samples(batch):
            return
        leaves = list_leaves(batch)
        ends = [end for leaf in leaves for end in (leaf.detach().amin(), leaf.detach().amax())]
        arrived = None
        if ends and ends[0].is_cuda:
            device = torch.stack([end.double() for end in ends])
            host = torch.empty_like(device, device="cpu", pin_memory=True)
            ends, arrived = [host.copy_(device, non_blocking=True)], torch.cuda.Event()
            arrived.record()
        self._waiting.append((batch, leaves, ends, arrived))
        while self._waiting and (arrived is None or len(self._waiting) > MAX_DELAY):
            self._look()

    def _look(self) -> None:
        """At the oldest batch whose least and greatest values were computed."""
        batch, leaves, ends, arrived = self._waiting.popleft()
        if arrived is not None:
            arrived.synchronize()
            ends = list(ends[0])
        index = self._num_batches
        self._num_batches += 1
        is_due = not index & (index - 1)
        has_time = is_due or index < NUM_LARGE
        untold: list[Trait] = []
        for number, leaf in enumerate(leaves):
            if has_time or leaf.numel() < LARGE:
                kinds = _find_kinds(leaf, float(ends[2 * number]), float(ends[2 * number + 1]))
                news = [kind for kind in kinds if not self._is_told(Trait(number, kind))]
                untold += [Trait(number, kind) for kind in news and _keep_present(leaf, news)]
        if untold or is_due:
            self._choose(batch, untold, index, is_due)

    def _is_told(self, trait: Trait) -> bool:
        return bool(self._names) and self._told[trait] >= self._names

    def _choose(self, batch: Any, untold: list[Trait], index: int, is_due: bool) -> None:
        """Note samples to compare: those that differ in a trait more than any compared so far, then others."""
        pool = join_samples(self._first, batch)
        if self._first is None:
            self._first = take_samples(batch, [0])
        size, groups = count_samples(pool), [dict[int, None]()]
        for trait in reversed(untold):  # labels come last
            counts = count_trait(pool, trait)
            spread = float(counts.max() - counts.min())
            pair = dict.fromkeys([int(counts.argmin()), int(counts.argmax())])
            if not spread or not (is_due or spread > 2.0 * self._spread[trait]):
                continue
            if len(groups[-1] | pair) > self._num_samples:
                if len(groups) == MAX_GROUPS:
                    break
                groups.append({})
            groups[-1] |= pair
            self._spread[trait] = max(spread, self._spread[trait])
        others = dict.fromkeys((index + each * max(1, size // self._num_samples)) % size for each in range(size))
        for group in [each for each in groups if each or is_due]:
            every = list(group | others)
            rows = [every[each % len(every)] for each in range(self._num_samples)]
            samples = take_samples(pool, list(range(self._num_samples)) if has_own_samples(pool) else rows)
            self._chosen.append((samples, {each: count_trait(samples, each) for each in untold}))

    def judge(self) -> bool:
        """Compare what was chosen since the last call, if any rank has something; whether there was. Collective.

        Raises ConfigError, on every rank, for what depends on how a batch is split.
        """
        while self._waiting:
            self._look()
        chosen, self._chosen = self._chosen, []
        number = max(self._world.gather(len(chosen)))
        if not number or self._first is None:
            return False
        verdict = _Verdict()
        for index in range(number):  # as often on every rank: the model may be divided among them
            spare = take_samples(self._first, [0] * self._num_samples), {}
            self._compare(*(chosen[index % len(chosen)] if chosen else spare), verdict)
        for each in self._world.gather(verdict):
            if each.problem is not None:
                name, problem = each.problem
                why, remedy = self._consequence
                raise ConfigError(*self._subject(name), f"{problem}, {why}", remedy)
            self._names |= each.names
            for trait, names in each.told.items():
                self._told[trait] |= names
        return True

    def _compare(self, samples: Any, counts: Mapping[Trait, Tensor], verdict: _Verdict) -> None:
        size = count_samples(samples)
        # Two of each, where that is no more than all, because one alone may lose its dimension.
        times = 1 if self._num_samples < 3 or has_own_samples(samples) else 2
        parts = [take_samples(samples, [each % size] * times) for each in range(self._num_samples)]
        with preserve_rng():
            measured = [self._measure(samples), self._measure(samples)]
            try:
                measured += [self._measure(each) for each in parts]
            except (RuntimeError, ValueError, IndexError) as error:
                raised = f"raises {type(error).__name__} ({summarize_error(error)}) of one sample"
                verdict.problem = next(iter(measured[0]), LOSS), raised
                return
        for name in measured[0]:
            verdict.names.add(name)
            if verdict.problem is None:
                figures = torch.stack([pad(each[name].cpu(), (0, 5))[:5] for each in measured[: 2 + size]])
                self._compare_one(name, figures, counts, verdict)

    def _compare_one(self, name: str, figures: Tensor, counts: Mapping[Trait, Tensor], verdict: _Verdict) -> None:
        """figures: [2 + n, 5]: of all samples, again, and of each"""
        weights = figures[:, 1:2]
        means = torch.where(weights == 0, 0.0, figures[:, [0, 2]] / weights)  # [2 + n, 2]: value, derivative
        whole, again, each = means[0], means[1], means[2:]
        largest = torch.where(weights == 0, 0.0, torch.cat([figures[:, :1], figures[:, 3:4]], 1) / weights).abs()
        tolerance = max(self._tolerance, NUM_ROUNDINGS * float(figures[0, 4]))
        margin = tolerance * largest.nan_to_num(0.0, 0.0, 0.0).amax(0) + 1e-30
        if not whole.isfinite().all() or ((whole - again).abs() > margin).any():
            return
        mean = figures[2:, [0, 2]].sum(0) / weights[2:].sum() if weights[2:].sum() else torch.zeros(2)
        wrong = ~((whole - mean).abs() <= margin)
        if wrong.any():
            what = "" if wrong[0] else "the gradient of "
            index = int(wrong.nonzero()[0])
            verdict.problem = (
                name,
                (
                    f"gives {float(whole[index]):.6g} as {what}a batch of {len(each)} samples, and "
                    f"{float(mean[index]):.6g} as the mean of its parts"
                ),
            )
            return
        plain = each.mean(0)
        for trait, count in counts.items():
            if all(_differs(plain, each, divisor, 4 * margin) for divisor in (count, 1.0 - count)):
                verdict.told[trait].add(name)


class _Verdict:
    """What one rank has found.

    problem: a name, and how it differs
    told:    the names to which a trait makes no difference
    """

    def __init__(self) -> None:
        self.problem: tuple[str, str] | None = None
        self.names: set[str] = set()
        self.told: dict[Trait, set[str]] = defaultdict(set)


def check_loss(model: ParallelModel, world: World, task: str, max_samples: int) -> SplitCheck:
    """The check of the loss of a run that splits batches; `max_samples`: of a micro-batch."""
    why = "so the run, which splits batches, would train on other gradients than one process"
    consequence = why, "return shoal.Mean(total, count) from it; check_loss=false accepts the mean of the parts"
    tolerance = find_tolerance(model)
    return SplitCheck(model.measure_loss, world, lambda _: ("Task.loss", task), consequence, max_samples, tolerance)


def check_metrics(model: ParallelModel, world: World, max_samples: int) -> SplitCheck:
    """The check of what an evaluation means over batches."""

    def evaluate(batch: Any) -> dict[str, Tensor]:
        return model.evaluate(batch, count_samples(batch), is_trial=True)

    def name_method(name: str) -> tuple[str, str]:
        return ("Task.loss", "validation") if name == LOSS else ("Task.metrics", name)

    why = "so an evaluation of several batches would depend on batch_size"
    remedy = "return shoal.Mean(total, count), or take a metric of torchmetrics, by Task.stateful_metrics"
    consequence = why, f"{remedy}; check_loss=false accepts the mean of the batches"
    return SplitCheck(evaluate, world, name_method, consequence, max_samples, find_tolerance(model))


def find_tolerance(model: ParallelModel) -> float:
    """Relative, of what the model computes."""
    types = {each.dtype for module in model.modules for each in module.parameters() if each.is_floating_point()}
    if model.forward_dtype is not None:
        types.add(model.forward_dtype)
    return max(TOLERANCE, *(NUM_ROUNDINGS * torch.finfo(each).eps for each in types), 0.0)


def _differs(plain: Tensor, each: Tensor, divisor: Tensor, margin: Tensor) -> bool:
    """Whether means that are weighted so are other ones."""
    weighted = (each * divisor[:, None]).sum(0) / divisor.sum()
    return bool(((weighted - plain).abs() > margin).any())


def list_leaves(batch: Any) -> list[Tensor]:
    """The tensors of which traits are counted, whose rows are the samples."""
    size = 0 if has_own_samples(batch) else count_samples(batch)
    every = [leaf for leaf in tensors_of(batch) if leaf.ndim and len(leaf) == size and leaf.numel()]
    return [leaf for leaf in every if not leaf.is_complex() and leaf.layout is torch.strided]


def _find_kinds(leaf: Tensor, low: float, high: float) -> list[int | str]:
    """The traits that elements between these may have."""
    if leaf.is_floating_point() or leaf.numel() >= MANY:
        is_there = {"missing": low != low, "ignored": low <= IGNORED, "negative": low < 0.0}
        is_there |= {"zero": low <= 0.0 <= high, "varied": low != high}
        return [kind for kind, is_so in is_there.items() if is_so or low != low]
    return list(range(max(-1, int(low)), min(NUM_CLASSES, int(high) + 1)))


def _mark(leaf: Tensor, kind: int | str) -> Tensor:
    return _MARKS[kind](leaf) if isinstance(kind, str) else leaf.long().clamp(-1, NUM_CLASSES) == kind


def _keep_present(leaf: Tensor, kinds: list[int | str]) -> list[int | str]:
    """Those that elements have."""
    if isinstance(kinds[0], str):
        return [kind for kind in kinds if _mark(leaf, kind).any()]
    found = (leaf.flatten().long().clamp(-1, NUM_CLASSES) + 1).bincount(minlength=NUM_CLASSES + 2).tolist()
    return [kind for kind in kinds if found[int(kind) + 1]]


def count_trait(batch: Any, trait: Trait) -> Tensor:
    """[n], float64, on the CPU: the share of each sample's elements that have the trait."""
    leaf = list_leaves(batch)[trait.leaf]
    return _mark(leaf, trait.kind).reshape(len(leaf), -1).double().mean(1).cpu()
