"""Which engine computes the members of a model, and how many at once: a short trial on this device, or the user's word.

Owns the table of engines and the trial. Called by a group of members before its first step. The trial works on copies:
rows, buffers and generators stay as they were. An engine whose gradients differ from the loop's is not taken.
The loop over members, which fits every model, is the engine that others must equal.
Legend: k members of a chunk.
"""

from __future__ import annotations

import copy
import importlib
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, summarize_error
from shoal.extend.parallel import get_value
from shoal.libs.population.engines.engine import EngineMisfit, MemberChunk, MemberEngine
from shoal.libs.population.engines.member_dropout import replace_dropout
from shoal.libs.population.member_rows import MemberRows
from shoal.libs.population.objective import MODEL_ERRORS, MemberBatch, Objective, stack_trees

_process_generator = threading.Lock()


class LoopedEngine(MemberEngine):
    """`model` computes each member: its parameters' data are set to the member's rows.

    draws_randomly: the model takes random numbers from the process' generator, other than in dropout layers. Then that
                    generator is exchanged for the member's while the member computes, one thread at a time
    """

    name = "looped"
    max_chunk = 1  # a member takes its steps while its rows are in the cache

    def __init__(self, model: nn.Module, objective: Objective, *, draws_randomly: bool = False) -> None:
        self.model, self._dropout = replace_dropout(model)
        self.objective, self._draws_randomly = objective, draws_randomly
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        self._bound: tuple[MemberRows, int] | None = None  # what the tensors are now
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        for name, _ in model.named_buffers():
            path, _, key = name.rpartition(".")
            self._owners[name] = model.get_submodule(path), key

    def compute_gradients(self, chunk: MemberChunk, batch: MemberBatch) -> Tensor:
        chunk.rows.gradients.zero_()
        self.model.train()
        self._dropout.generators = chunk.generators
        losses = []
        for index, generator in enumerate(chunk.generators):
            self._bind(chunk, index)
            content = batch.of_member(index)
            with self._exchange(generator):
                loss = get_value(self.objective.loss(self.model(*self.objective.inputs(content)), content))
                if not isinstance(loss, Tensor) or loss.ndim:
                    kind = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
                    raise ConfigError("loss", kind, "is no scalar tensor", "return the mean over the batch")
                loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():  # most models change their buffers in place; others assign new ones
                for name, (module, key) in self._owners.items():
                    row, buffer = chunk.rows.buffers[name][index], module._buffers[key]
                    if buffer is not None and buffer.data_ptr() != row.data_ptr():
                        row.copy_(buffer)
                        module._buffers[key] = row.data
        return torch.stack(losses)

    @torch.no_grad()
    def predict(self, chunk: MemberChunk, batch: MemberBatch) -> Any:
        self.model.eval()
        outputs = []
        for index in range(len(chunk)):
            self._bind(chunk, index)
            outputs.append(self.model(*self.objective.inputs(batch.of_member(index))))
        return stack_trees(outputs)

    def _bind(self, chunk: MemberChunk, index: int) -> None:
        self._dropout.member = index
        if self._bound is not None and self._bound[0] is chunk.rows and self._bound[1] == index:
            return
        self._bound = (chunk.rows, index)
        for name, parameter in self._parameters.items():
            parameter.grad = None  # which lets the data have another address
            parameter.data = chunk.rows.parameters[name][index]
            parameter.grad = chunk.rows.gradient_views[name][index]
        for name, parameter in self._frozen.items():
            parameter.data = chunk.rows.buffers[name][index]
        for name, (module, key) in self._owners.items():
            module._buffers[key] = chunk.rows.buffers[name][index].data  # autograd counts changes of each alone

    @contextmanager
    def _exchange(self, generator: torch.Generator) -> Iterator[None]:
        if not self._draws_randomly:
            yield
            return
        process = find_process_generator(generator.device)
        with _process_generator:
            before = process.get_state()
            process.set_state(generator.get_state())
            try:
                yield
                generator.set_state(process.get_state())
            finally:
                process.set_state(before)


def find_process_generator(device: torch.device) -> torch.Generator:
    """The generator from which operations without one take their random numbers."""
    if device.type == "cuda":
        generator: torch.Generator = torch.cuda.default_generators[device.index or 0]
        return generator
    return torch.default_generator


_HOMES = {
    "lanes": "shoal.libs.population.engines.lanes.lane_network:LanesEngine",
    "stacked": "shoal.libs.population.engines.stacked:StackedEngine",
    "vmap": "shoal.libs.population.engines.stacked:VmapEngine",
}
MIN_CHUNK, MAX_CHUNK = 4, 64  # of the trial: larger ones gained nothing on a CPU
NUM_TIMED, PATIENCE_S = 3, 0.5  # steps of one setting, and when fewer are enough
TOLERANCE = 1e-3  # between an engine's numbers and the loop's, as a share of their norm
CUDA_TOLERANCE = 1e-2  # where some algorithms of a convolution round its factors to 10 bits, and others do not


@dataclass(frozen=True)
class EngineTrial:
    """One setting's time: ms of one member's gradient."""

    engine: str
    chunk: int
    ms: float


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a group of members.

    chunk:          the most members that are computed together
    draws_randomly: the model takes random numbers other than in dropout layers
    reasons:        why other engines do not fit, by name
    """

    engine: str
    chunk: int
    draws_randomly: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)
    trials: tuple[EngineTrial, ...] = ()


def require_engine(name: str) -> None:
    """Raise ConfigError for a name that is no engine's."""
    if name not in ("auto", "looped", *_HOMES):
        raise ConfigError("engine", name, "no such engine", f"one of auto, looped, {', '.join(_HOMES)}")


def clone_generator(generator: torch.Generator) -> torch.Generator:
    """Another one in the same state."""
    clone = torch.Generator(generator.device)
    clone.set_state(generator.get_state())
    return clone


def make_engine(name: str, model: nn.Module, objective: Objective, *, draws_randomly: bool = False) -> MemberEngine:
    """An engine with its own copy of the model. Raises EngineMisfit."""
    model = copy.deepcopy(model)
    if name == "looped":
        return LoopedEngine(model, objective, draws_randomly=draws_randomly)
    if draws_randomly:
        raise EngineMisfit("the model draws random numbers other than in dropout layers")
    module, _, attribute = _HOMES[name].partition(":")
    engine: MemberEngine = getattr(importlib.import_module(module), attribute)(model, objective)
    return engine


@dataclass
class _Trial:
    """A model with some members and a batch for them. share: how many members a thread has."""

    model: nn.Module
    objective: Objective
    chunk: MemberChunk
    batch: MemberBatch
    share: float

    def copy_chunk(self, size: int) -> MemberChunk:
        """The first members, in other memory and with generators in the same state."""
        generators = [clone_generator(each) for each in self.chunk.generators[:size]]
        return MemberChunk(self.chunk.rows.narrow(0, size).clone(), generators)

    def compute(self, engine: MemberEngine, size: int) -> tuple[Tensor, ...]:
        """Losses [k], gradient rows [k, P] and buffer rows [k, Q] of the first members after a step."""
        chunk = self.copy_chunk(size)
        losses = engine.compute_gradients(chunk, self.batch.narrow(0, size))
        counters = chunk.rows.counter_rows.to(losses.dtype)
        return losses, chunk.rows.gradients, torch.cat([chunk.rows.buffer_rows, counters], 1)

    def time(self, engine: MemberEngine, mean: float) -> EngineTrial:
        """The fastest of a few steps of a chunk; `mean` is the mean size of chunks, of which the largest is tried.

        One thread's processor time where torch has one thread: it does not count what other processes take.
        """
        device = self.chunk.rows.weights.device
        read_s = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        size = math.ceil(mean)
        chunk = self.copy_chunk(size)
        batch = self.batch.narrow(0, size)
        times = list[float]()
        engine.compute_gradients(chunk, batch)
        while len(times) < NUM_TIMED and sum(times) < PATIENCE_S:
            _synchronize(device)
            began_s = read_s()
            engine.compute_gradients(chunk, batch)
            _synchronize(device)
            times.append(read_s() - began_s)
        return EngineTrial(engine.name, size, min(times) * 1e3 / mean)


def select_engine(
    model: nn.Module,
    objective: Objective,
    chunk: MemberChunk,
    batch: MemberBatch,
    *,
    share: float,
    engine: str = "auto",
    max_chunk: int | None = None,
) -> EngineChoice:
    """Try the engines with some members and their batch, and choose the fastest.

    share:             how many members each thread has
    engine, max_chunk: what the user chose; what is left open is tried
    Raises ConfigError for a chosen engine that does not fit the model, with the reason;
    and whatever the model raises when it is computed alone.
    """
    trial = _Trial(model, objective, chunk, batch, share)
    draws_randomly = _probe_randomness(trial)
    looped = make_engine("looped", model, objective, draws_randomly=draws_randomly)
    reference = trial.compute(looped, min(2, len(chunk)))
    reasons: dict[str, str] = {}
    engines: dict[str, MemberEngine] = {}
    trials: list[EngineTrial] = []
    for name in ["looped", *_HOMES] if engine == "auto" else [engine]:
        if engine == "auto" and name == "vmap":
            is_on_cpu = chunk.rows.weights.device.type == "cpu"
            convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
            if "stacked" in engines:
                reasons[name] = "not tried: stacked computes the same with fewer operations"
                continue
            if is_on_cpu and any(isinstance(module, convolutions) for module in model.modules()):
                reasons[name] = "not tried: a convolution of many members is slower on a CPU than one of each"
                continue
        try:
            tried = make_engine(name, model, objective, draws_randomly=draws_randomly)
            _require_equal(trial.compute(tried, len(reference[0])), reference)
        except EngineMisfit as misfit:
            reasons[name] = str(misfit)
            continue
        except MODEL_ERRORS as error:
            if name == "looped" or isinstance(error, ConfigError):
                raise
            reasons[name] = summarize_error(error)
            continue
        engines[name] = tried
        if max_chunk is None or engine == "auto":
            trials += _time_chunks(trial, tried, max_chunk)
    if not engines:
        raise ConfigError("engine", engine, f"does not fit the model: {reasons[engine]}", "engine=auto takes another")
    if not trials:
        assert max_chunk is not None
        return EngineChoice(engine, min(max_chunk, engines[engine].max_chunk or max_chunk), draws_randomly, reasons)
    best = min(trials, key=lambda each: each.ms)
    most = engines[best.engine].max_chunk or max_chunk
    size = best.chunk if max_chunk is None else min(max_chunk, most or max_chunk)
    return EngineChoice(best.engine, size, draws_randomly, reasons, tuple(trials))


def _probe_randomness(trial: _Trial) -> bool:
    """Whether a step takes numbers from the process' generator, which is left as it was."""
    process = find_process_generator(trial.chunk.rows.weights.device)
    before = process.get_state()
    trial.compute(make_engine("looped", trial.model, trial.objective), 1)
    is_changed = not torch.equal(before, process.get_state())
    process.set_state(before)
    return is_changed


def _require_equal(computed: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Raise EngineMisfit where losses, gradients or buffers are not the loop's. Infinite ones say nothing."""
    for what, one, other in zip(("losses", "gradients", "buffers"), computed, expected, strict=True):
        one, other = one.reshape(len(one), -1), other.reshape(len(other), -1)
        distance, norm = (one - other).norm(dim=1), other.norm(dim=1)
        is_known = norm.isfinite()
        tolerance = CUDA_TOLERANCE if one.is_cuda else TOLERANCE
        if not bool((distance[is_known] <= tolerance * (norm[is_known] + tolerance)).all()):
            share = float((distance[is_known] / norm[is_known]).max())
            raise EngineMisfit(f"its {what} differ from the loop's by {share:.1e} of their norm")


def _time_chunks(trial: _Trial, engine: MemberEngine, max_chunk: int | None) -> Iterator[EngineTrial]:
    """Larger and larger chunks of equal sizes, until they are slower."""
    most = min(len(trial.chunk), engine.max_chunk or MAX_CHUNK, max_chunk or MAX_CHUNK)
    means = [trial.share / parts for parts in (16, 8, 4, 2, 1)]
    means = [mean for mean in means if MIN_CHUNK <= math.ceil(mean) <= most] or [most]
    best_ms = float("inf")
    for mean in means if max_chunk is None else means[-1:]:
        timed = trial.time(engine, mean)
        yield timed
        if timed.ms > best_ms * 1.1:
            return
        best_ms = min(best_ms, timed.ms)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
