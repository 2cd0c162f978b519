"""Hogwild: lanes that train one copy of the weights at once, without locks (Niu et al., 1106.5730, algorithm 1).

A lane reads its share of each batch, computes a gradient with the weights as they are, and takes the step of its own
optimiser in place, whatever the others write meanwhile. Lane 0 is the Trainer, which evaluates, saves and reports; the
others are threads of its process, or processes that share its weights. With `auto` both are tried for a second each,
while they train, and the faster stay. What an optimiser stores (momentum, say) is each lane's own; lane 0's is saved.

| queue         | capacity          | what blocks | who unblocks           | close()                      |
|---------------|-------------------|-------------|------------------------|------------------------------|
| lanes' counts | a number per lane | nothing     |                        | ends all lanes, within a step |
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Literal, NamedTuple, Protocol

import torch
import torch.multiprocessing
from torch import Tensor

from shoal.cpu_count import count_usable_cores
from shoal.errors import ConfigError, RankLost, TrainError
from shoal.libs.asynchronous.config import HogwildConfig
from shoal.parallel import World
from shoal.random_state import preserve_rng
from shoal.sync.rank_signals import RankSignals, RankSync
from shoal.sync.synchronizer import Replica, Synchronizer
from shoal.train.loop.components import TrainComponents, build_components
from shoal.train.loop.replica import TrainReplica
from shoal.train.spec import TrainSpec
from shoal.train.task import make_task

Mode = Literal["threads", "processes"]
TRIAL_S, IDLE_S, START_TIMEOUT_S, END_TIMEOUT_S = 1.0, 0.005, 300.0, 30.0
RUN, PAUSE, END = 0, 1, 2
BUSY, READY = 1, 2
ERROR_BYTES = 8192


class LaneMemory(NamedTuple):
    """What lanes share: tensors in shared memory.

    weights: of all parameters of the model
    buffers: of the model, with which lanes begin; each has its own from then on
    rates:   [groups]: the learning rates
    counts:  [lanes], int64: steps of each lane
    states:  [lanes], uint8: 0 before a lane is ready, BUSY within a step, READY between two
    command: [1], uint8: RUN, PAUSE or END
    errors:  [lanes, ERROR_BYTES], uint8: what each lane has raised, with its traceback, in UTF-8 that ends with zeros
    """

    weights: list[Tensor]
    buffers: list[Tensor]
    rates: Tensor
    counts: Tensor
    states: Tensor
    command: Tensor
    errors: Tensor


class _Lane(Protocol):
    """A thread or a process."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float) -> None: ...


class LaneGroup:
    """The lanes besides lane 0, of one kind. They wait until `resume`."""

    def __init__(
        self,
        mode: Mode,
        spec: TrainSpec,
        weights: list[Tensor],
        buffers: list[Tensor],
        rates: Tensor,
        step: int,
    ) -> None:
        self.mode, num = mode, spec.applied_sync.num_lanes
        states = torch.zeros(num, dtype=torch.uint8).share_memory_()
        command = torch.full((1,), PAUSE, dtype=torch.uint8).share_memory_()
        counts = torch.zeros(num, dtype=torch.int64).share_memory_()
        errors = torch.zeros(num, ERROR_BYTES, dtype=torch.uint8).share_memory_()
        self.memory = LaneMemory(weights, buffers, rates, counts, states, command, errors)
        self._lanes: list[_Lane] = []
        for lane in range(1, num):
            name = f"lane {lane}"
            if mode == "processes":
                self._lanes.append(_start_process(name, _run_lane_process, (spec, lane, self.memory, step)))
                continue
            with preserve_rng():
                parts = _build_lane(spec, lane, self.memory, step)
            arguments = parts, lane, self.memory, step
            thread = threading.Thread(target=_run_lane, args=arguments, name=name, daemon=True)
            thread.start()
            self._lanes.append(thread)

    def wait_until_ready(self) -> None:
        """Every lane has its model and data. Raises RankLost when one has died, or is not ready in time; TrainError."""
        self._wait(lambda: bool(self.memory.states[1:].all()), START_TIMEOUT_S)

    def resume(self) -> None:
        self.memory.command.fill_(RUN)

    def pause(self) -> None:
        """No lane writes weights when this returns."""
        self.memory.command.fill_(PAUSE)
        self._wait(lambda: bool((self.memory.states[1:] == READY).all()), START_TIMEOUT_S)

    def require_alive(self) -> None:
        """Raises RankLost, or TrainError for a lane that has raised an error."""
        for index, lane in enumerate(self._lanes, 1):
            if not lane.is_alive():
                name = f"lane {index} of Hogwild ({self.mode})"
                if error := self.memory.errors[index].numpy().tobytes().rstrip(b"\0").decode(errors="replace"):
                    raise TrainError(f"{name}: {error}")
                raise RankLost(f"{name} has died")

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_done():
            self.require_alive()
            if time.monotonic() > deadline:
                raise RankLost(f"a lane of Hogwild ({self.mode}) has not answered for {timeout_s:g} s")
            time.sleep(IDLE_S)

    def close(self) -> None:
        """Idempotent."""
        self.memory.command.fill_(END)
        for lane in self._lanes:
            lane.join(END_TIMEOUT_S)
            if isinstance(lane, BaseProcess) and lane.is_alive():
                lane.terminate()


def _start_process(name: str, target: Callable[..., None], arguments: tuple[object, ...]) -> BaseProcess:
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    process: BaseProcess = context.Process(target=target, args=arguments, name=name, daemon=True)
    process.start()
    return process


def _build_lane(spec: TrainSpec, lane: int, memory: LaneMemory, step: int) -> TrainComponents:
    """A lane's model, whose parameters are the shared ones, its optimiser and its share of the data."""
    task = make_task(spec.task, spec.args)
    parts = build_components(spec, task, World.single(spec.device), (lane, spec.applied_sync.num_lanes))
    for own, shared in zip(_get_parameters(parts), memory.weights, strict=True):
        own.data = shared
    for own, given in zip(_get_buffers(parts), memory.buffers, strict=True):
        own.copy_(given)
    if parts.steps_per_epoch is not None:
        epoch, within = divmod(step, parts.steps_per_epoch)
        parts.training.seek(epoch, within * spec.batch_size)
    return parts


def _run_lane_process(spec: TrainSpec, lane: int, memory: LaneMemory, step: int) -> None:
    """The process of a lane; it ends with its parent."""
    torch.set_num_threads(1)
    parent = torch.multiprocessing.parent_process()
    assert parent is not None
    _run_lane(_build_lane(spec, lane, memory, step), lane, memory, step, parent.is_alive)


def _run_lane(
    parts: TrainComponents, lane: int, memory: LaneMemory, step: int, is_needed: Callable[[], bool] = lambda: True
) -> None:
    """Train until the command is END."""
    try:
        memory.states[lane] = READY
        while (command := int(memory.command)) != END and is_needed():
            if command == PAUSE:
                time.sleep(IDLE_S)
                continue
            batch = parts.stream.next()
            memory.states[lane] = BUSY
            if int(memory.command) == RUN:  # else it has changed since
                parts.train_step(batch, step + int(memory.counts[lane]))
                if parts.spec.clip_norm is not None:
                    parts.model.clip_gradients(parts.spec.clip_norm)
                for group, rate in zip(parts.optimizer.param_groups, memory.rates.tolist(), strict=True):
                    group["lr"] = rate
                parts.optimizer.step()
                memory.counts[lane] += 1
            memory.states[lane] = READY
    except Exception as error:  # noqa: BLE001 - lane 0 raises it
        lines = [f"{type(error).__name__}: {error}\n", *traceback.format_exception(error)]
        encoded = bytearray("".join(lines).encode()[:ERROR_BYTES])
        memory.errors[lane, : len(encoded)] = torch.frombuffer(encoded, dtype=torch.uint8)
    finally:
        parts.close()


def _get_parameters(parts: TrainComponents) -> list[Tensor]:
    return [each for module in parts.model.modules for each in module.parameters()]


def _get_buffers(parts: TrainComponents) -> list[Tensor]:
    return [each for module in parts.model.modules for each in module.buffers()]


class HogwildSync(Synchronizer):
    """Of lane 0, whose model's parameters are put into shared memory."""

    def __init__(self, replica: Replica) -> None:
        assert isinstance(replica, TrainReplica)
        assert isinstance(replica.config, HogwildConfig)
        parts, self._config, self._journal = replica.parts, replica.config, replica.journal
        if (device := replica.world.device.type) != "cpu":
            problem = f"lanes write one copy of the weights in the memory of the host, and this run is on {device}"
            raise ConfigError(*self._config.chosen_by, problem, "use device=cpu, or leave it out")
        self._parts, self._spec = parts, parts.spec
        torch.set_num_threads(parts.spec.threads or max(1, count_usable_cores() // self._config.lanes))
        self._rank_sync = RankSync(replica.world)
        self._weights = [each.data.share_memory_() for each in _get_parameters(parts)]
        self._rates = torch.zeros(len(parts.optimizer.param_groups), dtype=torch.float64).share_memory_()
        self._groups: list[LaneGroup] = []  # one, once the trial is over
        self._rivals: dict[Mode, float] = {}  # steps a second of the kinds that were tried
        self._trial_began = (0.0, 0)  # of the present kind: seconds, steps
        self._began = self._num_own = 0  # the step at which this attempt begins; steps of lane 0
        self._num_finished = 0  # steps of lanes that have ended

    def begin(self, step: int) -> int:
        self._began = step
        mode = self._config.mode
        buffers = [each.detach().clone().share_memory_() for each in _get_buffers(self._parts)]
        self._write_rates()
        modes: tuple[Mode, ...] = ("threads", "processes") if mode == "auto" else (mode,)
        for each in modes:
            self._groups.append(LaneGroup(each, self._spec, self._weights, buffers, self._rates, step))
        for group in self._groups:
            group.wait_until_ready()
        self._begin_kind(self._groups[0])
        return step

    def _begin_kind(self, group: LaneGroup) -> None:
        self._trial_began = time.monotonic(), self._count_steps()
        group.resume()

    def before_step(self) -> None:
        """The weights are where lanes have put them."""

    def apply_gradients(self) -> int:
        self._write_rates()
        self._parts.optimizer.step()
        self._parts.model.on_optimizer_step()
        self._num_own += 1
        self._groups[0].resume()  # after a save
        if len(self._groups) > 1:
            self._try_kinds()
        return self._began + self._count_steps() // self._config.lanes

    def _count_steps(self) -> int:
        """Of all lanes in this attempt."""
        return self._num_own + self._num_finished + sum(int(group.memory.counts.sum()) for group in self._groups)

    def _write_rates(self) -> None:
        self._rates.copy_(torch.tensor([group["lr"] for group in self._parts.optimizer.param_groups]))

    def _try_kinds(self) -> None:
        """Measure the kind that runs, then the other; keep the faster."""
        began_s, began = self._trial_began
        elapsed_s = time.monotonic() - began_s
        if elapsed_s < TRIAL_S:
            return
        tried, other = self._groups
        self._rivals[tried.mode] = (self._count_steps() - began) / elapsed_s
        tried.pause()
        if len(self._rivals) == 1:
            self._groups = [other, tried]
            self._begin_kind(other)
            return
        self._groups = sorted(self._groups, key=lambda group: -self._rivals[group.mode])
        loser = self._groups.pop()
        loser.close()
        self._num_finished += int(loser.memory.counts.sum())
        self._groups[0].resume()
        rates = {f"{mode}_steps_per_s": round(rate, 2) for mode, rate in self._rivals.items()}
        self._journal.record_event("hogwild", mode=self._groups[0].mode, lanes=self._config.lanes, **rates)

    def is_exchange_due(self) -> bool:
        return self._rank_sync.is_due()

    def exchange(self, mine: RankSignals) -> RankSignals:
        for group in self._groups:
            group.require_alive()
        return self._rank_sync.exchange(mine)

    def collect_state(self) -> None:
        """Until the next step of lane 0, no lane writes weights: a checkpoint is of one moment."""
        for group in self._groups:
            group.pause()

    def end(self) -> None:
        for group in self._groups:
            group.close()

    def close(self) -> None:
        self.end()
