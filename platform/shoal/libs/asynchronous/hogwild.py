"""Hogwild: lanes that train one copy of the weights at once, without locks (Niu et al., 1106.5730, algorithm 1).

A lane reads its share of each batch, computes a gradient with the weights as they are, and takes the step of its own
optimiser in place, whatever the others write meanwhile. Lane 0 is the Trainer, which evaluates, saves and reports; the
others are threads of its process. What an optimiser stores (momentum, say) is each lane's own; lane 0's is saved.

| queue         | capacity          | what blocks | who unblocks           | close()                       |
|---------------|-------------------|-------------|------------------------|-------------------------------|
| lanes' counts | a number per lane | nothing     |                        | ends all lanes, within a step |
"""

from __future__ import annotations

import threading
import traceback

import torch
from torch import Tensor

from shoal.cpu_count import count_usable_cores
from shoal.errors import ConfigError, RankLost, TrainError
from shoal.extend.parallel import World
from shoal.extend.sync import RankSignals, RankSync, Replica, Synchronizer
from shoal.extend.train import TrainComponents, TrainReplica, build_components, make_task
from shoal.random_state import preserve_rng

PAUSE_TIMEOUT_S, END_TIMEOUT_S = 300.0, 30.0  # for the step that a lane is in


class Lane(threading.Thread):
    """A lane besides lane 0. It waits until `resume`.

    main:      the components of lane 0, which have the weights
    begin:     the steps of the run before
    num_steps: that this lane has taken
    error:     what it has raised, with its traceback; "": nothing
    """

    def __init__(self, index: int, main: TrainComponents, begin: int) -> None:
        super().__init__(name=f"lane {index} of Hogwild", daemon=True)
        self.num_steps, self.error = 0, ""
        self._begin = begin
        self._main = main
        spec = main.spec
        with preserve_rng():
            task = make_task(spec.task, spec.args)
            parts = build_components(spec, task, World.single(spec.device), (index, spec.applied_sync.num_lanes))
        for own, shared in zip(_list_tensors(parts, "parameters"), _list_tensors(main, "parameters"), strict=True):
            own.data = shared.data
        for own, given in zip(_list_tensors(parts, "buffers"), _list_tensors(main, "buffers"), strict=True):
            own.copy_(given)
        if parts.steps_per_epoch is not None:
            epoch, within = divmod(begin, parts.steps_per_epoch)
            parts.training.seek(epoch, within * spec.batch_size)
        self._parts = parts
        self._may_step, self._is_ending = threading.Event(), False
        self._step_lock = threading.Lock()  # held during a step

    def run(self) -> None:
        try:
            while self._may_step.wait() and not self._is_ending:
                batch = self._parts.stream.next()
                with self._step_lock:
                    if self._may_step.is_set():  # else it has been paused since
                        self._step(batch)
        except Exception as error:  # noqa: BLE001 - lane 0 raises it
            self.error = "".join([f"{type(error).__name__}: {error}\n", *traceback.format_exception(error)])
        finally:
            self._parts.close()

    def _step(self, batch: object) -> None:
        parts = self._parts
        parts.train_step(batch, self._begin + self.num_steps)
        if parts.spec.clip_norm is not None:
            parts.model.clip_gradients(parts.spec.clip_norm)
        for own, scheduled in zip(parts.optimizer.param_groups, self._main.optimizer.param_groups, strict=True):
            own["lr"] = scheduled["lr"]
        parts.optimizer.step()
        self.num_steps += 1

    def resume(self) -> None:
        self._may_step.set()

    def pause(self) -> None:
        """The lane writes no weights when this returns. Raises RankLost when its step does not end."""
        self._may_step.clear()
        if not self._step_lock.acquire(timeout=PAUSE_TIMEOUT_S):
            raise RankLost(f"{self.name} has not answered for {PAUSE_TIMEOUT_S:g} s")
        self._step_lock.release()

    def require_no_error(self) -> None:
        """Raises TrainError for what the lane has raised."""
        if self.error:
            raise TrainError(f"{self.name}: {self.error}")

    def end(self) -> None:
        """End within a step. Idempotent."""
        self._is_ending = True
        self._may_step.set()
        self.join(END_TIMEOUT_S)


def _list_tensors(parts: TrainComponents, kind: str) -> list[Tensor]:
    return [each for module in parts.model.modules for each in getattr(module, kind)()]


class HogwildSync(Synchronizer):
    """Of lane 0, with the other lanes."""

    def __init__(self, replica: Replica) -> None:
        assert isinstance(replica, TrainReplica)
        config, self._num_lanes = replica.config, replica.config.num_lanes
        if (device := replica.world.device.type) != "cpu":
            problem = f"lanes write one copy of the weights in the memory of the host, and this run is on {device}"
            raise ConfigError(*config.chosen_by, problem, "use device=cpu, or leave it out")
        self._parts = replica.parts
        torch.set_num_threads(self._parts.spec.threads or max(1, count_usable_cores() // self._num_lanes))
        self._rank_sync = RankSync(replica.world)
        self._lanes: list[Lane] = []
        self._begin = self._num_own = 0  # the step at which this attempt begins; steps of lane 0

    def begin(self, step: int) -> int:
        self._begin = step
        self._lanes = [Lane(index, self._parts, step) for index in range(1, self._num_lanes)]
        for lane in self._lanes:
            lane.start()
            lane.resume()
        return step

    def before_step(self) -> None:
        """The weights are where lanes have put them."""

    def apply_gradients(self) -> int:
        self._parts.optimizer.step()
        self._parts.model.on_optimizer_step()
        self._num_own += 1
        for lane in self._lanes:  # after a save
            lane.resume()
        return self._begin + (self._num_own + sum(lane.num_steps for lane in self._lanes)) // self._num_lanes

    def is_exchange_due(self) -> bool:
        return self._rank_sync.is_due()

    def exchange(self, mine: RankSignals) -> RankSignals:
        for lane in self._lanes:
            lane.require_no_error()
        return self._rank_sync.exchange(mine)

    def collect_state(self) -> None:
        """Until the next step of lane 0, no lane writes weights: a checkpoint is of one moment."""
        for lane in self._lanes:
            lane.pause()

    def end(self) -> None:
        for lane in self._lanes:
            lane.end()

    def close(self) -> None:
        self.end()
