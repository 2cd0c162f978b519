"""The check that a loss, or a metric, does not depend on how a batch is split: that of several samples is the mean of
each one's.

A loss that divides by something else than the number of samples would be trained on other gradients than in one
process, and a metric would depend on the batch size. Which do cannot be read from their code, so the check compares
numbers. Samples show it only if they differ in what is divided by. So the check looks in every batch for *traits* that
no compared sample had: missing labels (-100, NaN, negative), zeros, one of the first classes.

Called by the Trainer and by evaluations with every batch; `judge` is collective, and called where the ranks exchange
signals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.batch_tree import (
    count_samples,
    has_own_samples,
    join_samples,
    move_to_device,
    take_samples,
    tensors_of,
)
from shoal.errors import ConfigError, summarize_error
from shoal.parallel import ParallelModel, World
from shoal.parallel.loss import LOSS
from shoal.random_state import preserve_rng
from shoal.train.spec import TrainSpec
from shoal.train.task import Task

NUM_SAMPLES = 6  # that are compared: each alone, and all together
MAX_GROUPS = 4  # of such samples, of one batch
TOLERANCE = 1e-4  # relative: a network rounds differently for another number of samples
NUM_ROUNDINGS = 4  # of a loss or a network in a type of less digits, as bf16
NUM_CLASSES = 32  # whole numbers below it are told apart; beyond, as those of tokens, they are not
LOWEST = -128  # of the negative ones
MANY = 1 << 18  # whole numbers, as of pictures, are not told apart
LARGE, NUM_LARGE = 1 << 15, 64  # of fractions, as in pictures: read in the first batches, and in each doubling
IGNORED = -100.0
_TRAINING = (
    "so the run, which splits batches, would train on other gradients than one process",
    "return shoal.Mean(total, count) from it; check_loss=false accepts the mean of the parts",
)
_EVALUATION = (
    "so an evaluation of several batches would depend on batch_size",
    "return shoal.Mean(total, count), or a metric of torchmetrics from stateful_metrics(); "
    "check_loss=false accepts the mean of the batches",
)


class Trait(NamedTuple):
    """What samples may differ in: how many elements of a tensor of the batch are so.

    leaf: the index of the tensor
    kind: a whole number, or a name of `_MARKS`
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

    task:        its name
    max_samples: the most that may be measured at once, if more than three
    evaluates:   check what an evaluation measures, instead of the loss in training

    Values that differ although the samples are the same cannot be compared, and pass.
    """

    def __init__(
        self, model: ParallelModel, world: World, task: str, max_samples: int, *, evaluates: bool = False
    ) -> None:
        self._model = model
        self._world = world
        self._task = task
        self._evaluates = evaluates
        self._num_samples = min(NUM_SAMPLES, max(3, max_samples))
        self._num_batches = 0
        self._known_kinds = defaultdict[int, set[int | str]](set)  # that were seen to make no difference, by tensor
        self._spread = defaultdict[Trait, float](float)  # the widest that was compared
        self._spare: Any = None  # a sample of the first batch
        self._chosen: list[tuple[Any, dict[Trait, Tensor]]] = []  # samples to compare, and the counts of their traits

    def watch(self, batch: Any) -> None:
        """Look at a batch that is trained on or evaluated, before it is on a device."""
        if not count_samples(batch):
            return
        index = self._num_batches
        self._num_batches += 1
        is_due = not index & (index - 1)
        unjudged = list(self._find_unjudged(batch, is_due or index < NUM_LARGE))
        if not (unjudged or is_due):
            return
        pool, groups = join_samples(batch, self._spare), [dict[int, None]()]
        if self._spare is None:
            self._spare = take_samples(batch, [0])
        for trait in reversed(unjudged):  # labels come last
            counts = count_trait(pool, trait)
            spread = float(counts.max() - counts.min())
            if not spread:
                self._spread[trait] += 0.0  # by which it is known
            elif is_due or spread > 2.0 * self._spread[trait]:
                pair = dict.fromkeys([int(counts.argmin()), int(counts.argmax())])
                if len(groups[-1] | pair) > self._num_samples:
                    groups.append({})
                if len(groups) > MAX_GROUPS:
                    break
                groups[-1] |= pair
                self._spread[trait] = max(spread, self._spread[trait])
        for group in groups[:MAX_GROUPS]:
            if group or is_due:
                rows = list(group | dict.fromkeys(range(count_samples(pool))))
                samples = take_samples(pool, rows[: self._num_samples])
                self._chosen.append((samples, {each: count_trait(samples, each) for each in unjudged}))

    def _find_unjudged(self, batch: Any, is_thorough: bool) -> Iterator[Trait]:
        """The traits of elements of the batch that are not judged; unless `is_thorough`, of those that had a spread, or
        are new, and not of large tensors but of labels."""
        for index, leaf in enumerate(list_leaves(batch)):
            are_numbers = leaf.is_floating_point() or leaf.numel() >= MANY
            if are_numbers and leaf.numel() >= LARGE and not is_thorough:
                continue
            if are_numbers:
                low, high = map(float, torch.aminmax(leaf))
                is_zero = low <= 0.0 <= high and (leaf == 0).any()
                is_there = {"ignored": low <= IGNORED, "negative": low < 0.0, "zero": is_zero, "varied": low != high}
                kinds: set[int | str] = set(_MARKS) if low != low else {each for each in is_there if is_there[each]}
            else:
                counted = torch.bincount(leaf.long().clamp(LOWEST, NUM_CLASSES).flatten() - LOWEST, minlength=1)
                kinds = {LOWEST + kind for kind in counted.nonzero().flatten().tolist()} - {NUM_CLASSES}
            news = [Trait(index, each) for each in kinds - self._known_kinds[index]]
            yield from (each for each in news if is_thorough or self._spread.get(each) != 0.0)

    def verify(self) -> None:
        """Compare what was chosen since the last call, if any rank has something. Collective.

        Raises ConfigError, on every rank, for what depends on how a batch is split.
        """
        chosen, self._chosen = self._chosen, []
        number = max(self._world.gather(len(chosen)))
        judged, problems = set[Trait](), dict[str, str]()
        for index in range(number):  # as often on every rank: the model may be divided among them
            judged |= self._compare(*(chosen[index % len(chosen)] if chosen else (self._spare, {})), problems)
        for theirs, others in self._world.gather((judged, problems)) if number else ():
            for trait in theirs:
                self._known_kinds[trait.leaf].add(trait.kind)
            for name, problem in others.items():
                why, remedy = _EVALUATION if self._evaluates else _TRAINING
                subject = ("Task.loss", self._task) if name == LOSS else ("Task.metrics", name)
                raise ConfigError(*subject, f"{problem}, {why}", remedy)

    def _measure(self, batch: Any) -> Mapping[str, Tensor]:
        batch = move_to_device(batch, self._world.device)
        if self._evaluates:
            return self._model.evaluate(batch, count_samples(batch), is_trial=True)
        return self._model.measure_loss(batch)

    def _compare(self, samples: Any, counts: Mapping[Trait, Tensor], problems: dict[str, str]) -> set[Trait]:
        """The traits that make no difference. Notes problems, by name."""
        size = count_samples(samples)
        times = 1 if size < 3 or has_own_samples(samples) else 2  # since one alone may lose its dimension
        measured: list[Mapping[str, Tensor]] = []
        errors: list[Exception] = []
        rows = [[index % size] * times for index in range(self._num_samples)]
        with preserve_rng():
            for part in (samples, samples, *(take_samples(samples, each) for each in rows)):
                try:
                    measured.append(self._measure(part))
                except (RuntimeError, ValueError, IndexError) as error:  # go on, as other ranks do
                    errors.append(error)
        if errors:
            if len(measured) > 1:  # otherwise it raises for samples that were put together, too
                why = f"raises {summarize_error(errors[0])!r} for one sample of a batch"
                problems[", ".join(measured[0]) or LOSS] = why
            return set()
        judged = set(counts) if measured[0] else set[Trait]()
        for name in measured[0]:
            figures = torch.stack([pad(each[name].cpu(), (0, 5))[:5] for each in measured[: 2 + size]])
            total, weight, slope, terms, eps = figures.unbind(1)
            both = torch.stack([total, slope])  # [2, 2 + n]: of all samples, of all again, and of each
            whole, again, *_ = means = _divide(both, weight).unbind(1)
            each = torch.stack(means[2:], 1)
            mean = _divide(both[:, 2:].sum(1), weight[2:].sum())
            largest = _divide(torch.stack([total, terms]), weight).abs().nan_to_num(0.0, 0.0, 0.0).amax(1)
            margin = max(self._find_tolerance(), NUM_ROUNDINGS * float(eps[0])) * largest + 1e-30
            if not whole.isfinite().all() or ((whole - again).abs() > margin).any():
                judged = set()  # it says nothing; others may
                continue
            is_close = ((whole - mean).abs() <= margin).tolist()
            if not all(is_close):
                at = is_close.index(False)
                what = f"{'the gradient ' * at}{whole[at]:.6g} for a batch of {size} samples"
                problems[name] = f"gives {what}, and {mean[at]:.6g} as the mean of its parts"
            judged &= {
                trait
                for trait, count in counts.items()
                if all(
                    ((_divide((each * share).sum(1), share.sum()) - each.mean(1)).abs() > 4.0 * margin).any()
                    for share in (count, 1.0 - count)  # by which a mean would be another one
                )
            }
        return judged

    def _find_tolerance(self) -> float:
        """Relative, of what the model computes."""
        types = {each.dtype for module in self._model.modules for each in module.parameters()}
        types |= {self._model.forward_dtype or torch.float32}
        return max(TOLERANCE, *(NUM_ROUNDINGS * torch.finfo(each).eps for each in types if each.is_floating_point))


def _divide(total: Tensor, weight: Tensor) -> Tensor:
    return torch.where(weight == 0, 0.0, total / weight)


def list_leaves(batch: Any) -> list[Tensor]:
    """The tensors of which traits are counted, whose rows are the samples."""
    size = 0 if has_own_samples(batch) else count_samples(batch)
    every = [leaf for leaf in tensors_of(batch) if leaf.ndim and len(leaf) == size and leaf.numel()]
    return [leaf for leaf in every if not leaf.is_complex() and leaf.layout is torch.strided]


def count_trait(batch: Any, trait: Trait) -> Tensor:
    """[n], float64, on the CPU: the share of each sample's elements that have the trait."""
    leaf, kind = list_leaves(batch)[trait.leaf], trait.kind
    marks = _MARKS[kind](leaf) if isinstance(kind, str) else leaf == kind
    return marks.reshape(len(leaf), -1).double().mean(1).cpu()


def make_checks(
    spec: TrainSpec, task: Task, model: ParallelModel, world: World, max_samples: int
) -> tuple[SplitCheck | None, SplitCheck | None]:
    """Those of a run: of its loss, where it splits batches, and of its metrics. None where other lanes move the weights
    meanwhile."""
    if not spec.check_loss or spec.applied_sync.num_lanes > 1:
        return None, None
    name = type(task).__name__
    # An `eval_step` may count something that only it knows to forget.
    metrics = SplitCheck(model, world, name, max_samples, evaluates=True) if task.eval_step is None else None
    return SplitCheck(model, world, name, max_samples) if spec.splits_batches else None, metrics
