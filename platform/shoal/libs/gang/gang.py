"""The replica's side of its workers: loads versions on them, sends micro-batches, replaces them when one dies.

Made by the replica's shell; the predictor opens its templates on it, as of any format, from the threads that load and
that compute. All workers are replaced together, with every loaded version; meanwhile requests get 503. Spare workers,
which have started and hold no version, take their place, so that this lasts as long as a version's loading: they have
built its model once, since the imports of that (torch's meta device needs 200 modules) take longer than its weights.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from shoal.errors import ClusterError, ConfigError, ShoalError
from shoal.extend.serve import Arrays, BatchLayout, Forward, GangSplit, TemplateConfig, find_hook, make_example
from shoal.libs.gang.messages import BuildModel, DropVersion, LoadVersion, RunBatch
from shoal.libs.gang.plan import find_plan
from shoal.libs.gang.team import GangLost, Launcher, StartedWorkers, Team
from shoal.weights import WeightFile, WeightSnapshot

logger = logging.getLogger(__name__)
REPLACE_S = 120.0  # after which the replica itself is to be replaced
MICRO_BATCHES_PER_STAGE = 2  # as in training; smaller ones cost more than the bubble, since batches follow each other
NUM_EXAMPLES = 2


class Gang:
    """The workers of this replica. `start` them first.

    launcher: starts their processes
    split:    how they share a model
    spares:   starts those of as many spare workers; None: lost workers are replaced by some that start then
    """

    def __init__(self, launcher: Launcher, num_workers: int, split: GangSplit, spares: Launcher | None = None) -> None:
        self.num_workers = num_workers
        self.split = split
        self._launcher = launcher
        self._spares = spares
        self._waiting: StartedWorkers | None = None  # the spare workers, once all have started
        self._preparing: threading.Thread | None = None
        self._keys = itertools.count(1)
        self._lock = threading.Lock()  # locked while workers start and versions load
        self._loaded: dict[int, LoadVersion] = {}
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()  # a collector of garbage may hold any lock
        self._team: Team | None = None
        self._is_closed = False
        self._lost_s = 0.0
        self._problem = ""

    @property
    def batches_in_flight(self) -> int:
        """How many batches are computed at once: while one leaves the stages of a pipeline, another enters them."""
        return 2 if self.split == "pipeline" else 1

    def start(self) -> None:
        """Start the workers. Raises ClusterError."""
        with self._lock:
            try:
                self._start_team()
            except GangLost as error:
                raise ClusterError(f"a worker was lost while it started: {error.reason}") from error
        threading.Thread(target=self._send_drops, name="shoal-gang-drops", daemon=True).start()

    def open_template(self, config: TemplateConfig) -> GangTemplate:
        """Open a model on the workers. Raises ConfigError for what they do not share, PlanError for a model that
        cannot be split."""
        return GangTemplate(config, self)

    def load(self, make: Callable[[int], LoadVersion]) -> int:
        """Load a version on all workers, or on none; returns its key. Raises WeightsError; and GangLost when workers
        are lost twice, by which the version may be to blame."""
        with self._lock:
            try:
                key = self._load(make(next(self._keys)))
            except GangLost:
                if self._team is None:
                    raise
                self._replace_team(self._team)
                key = self._load(make(next(self._keys)))
            self._prepare_spares()
            return key

    def drop(self, key: int) -> None:
        """Free a version that answers no more; the workers have computed its last batch by then."""
        self._dropped.put(key)

    def run(self, key: int, batches: Sequence[Arrays]) -> list[Arrays]:
        """Compute micro-batches, one after the other in each stage. Callable from several threads. Raises GangLost, and
        the model's error."""
        team = self._require_team()
        answering = [0 if self.split == "tensor" else self.num_workers - 1]
        answers = [team.broadcast(RunBatch(key, inputs), answering)[0] for inputs in batches]
        return [answer.result() for answer in answers]

    def check_health(self) -> None:
        """Raise ShoalError when lost workers cannot be replaced: the replica is to be replaced then."""
        if self._problem:
            raise ClusterError(f"the workers of this replica cannot be replaced: {self._problem}")
        if self._lost_s and time.monotonic() - self._lost_s > REPLACE_S:
            raise ClusterError(f"the workers of this replica were not replaced within {REPLACE_S:g} s")

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._is_closed = True
        if self._team is not None:
            self._team.fail("the replica ends")
        if self._preparing is not None:
            self._preparing.join()
        for launcher in filter(None, (self._launcher, self._spares)):
            launcher.stop()

    def _require_team(self) -> Team:
        team = self._team
        if team is None:
            raise GangLost("others are starting")
        return team

    def _load(self, version: LoadVersion) -> int:
        try:
            self._require_team().load(version)
        except ShoalError:
            self._dropped.put(version.key)
            raise
        self._loaded[version.key] = version
        return version.key

    def _send_drops(self) -> None:
        while not self._is_closed:
            key = self._dropped.get()
            with self._lock, suppress(GangLost):  # not between the start of others and their loading
                self._loaded.pop(key, None)
                self._require_team().broadcast(DropVersion(key), ())

    def _prepare_spares(self) -> None:
        """Start spare workers in a thread, unless there are some. Called with the lock."""
        if self._spares is None or self._waiting or (self._preparing is not None and self._preparing.is_alive()):
            return

        def prepare(launcher: Launcher) -> None:
            try:
                launcher.stop()
                workers = StartedWorkers.start(launcher, self.num_workers)
                for version in list(self._loaded.values()):
                    for channel in workers.channels:
                        channel.send(BuildModel(version.config.factory))
                    for channel in workers.channels:
                        channel.receive(REPLACE_S)
                self._waiting = workers
            except ShoalError as error:
                logger.warning("no spare workers, so that the replacement of lost ones takes longer: %s", error)

        self._preparing = threading.Thread(target=prepare, args=(self._spares,), name="shoal-gang-spares", daemon=True)
        self._preparing.start()

    def _start_team(self) -> None:
        """Start a team and load all versions on it. Raises ShoalError."""
        if self._preparing is not None:  # it has begun before others could
            self._preparing.join()
        if self._waiting is None:
            workers = StartedWorkers.start(self._launcher, self.num_workers)
        else:
            assert self._spares is not None
            workers, self._waiting = self._waiting, None
            self._launcher, self._spares = self._spares, self._launcher

        def replace(lost: Team) -> None:  # in the thread that has noticed the loss
            with self._lock:
                if self._team is lost:
                    self._replace_team(lost)

        team = Team(workers, replace)
        team.join(self.split)
        for version in list(self._loaded.values()):
            team.load(version)
        if team.loss is not None:
            raise team.loss
        self._team, self._lost_s = team, 0.0

    def _replace_team(self, team: Team) -> None:
        if self._is_closed:
            return
        self._team, self._lost_s = None, time.monotonic()
        ends_s = self._lost_s + REPLACE_S
        logger.warning("%s: all workers of this replica are replaced", team.loss)
        while not self._is_closed and time.monotonic() < ends_s:
            self._launcher.stop()
            try:
                self._start_team()
                logger.warning("they are replaced, after %.2f s", time.monotonic() - ends_s + REPLACE_S)
                return self._prepare_spares()
            except GangLost as error:
                logger.warning("another worker was lost while they started: %s", error.reason)
            except ShoalError as error:
                self._problem = str(error)
                return


class GangTemplate:
    """A model on the workers of `gang`: see `Gang.open_template`."""

    def __init__(self, config: TemplateConfig, gang: Gang) -> None:
        options, factory = config.options, config.factory
        for field, value, shared in (
            ("format", factory.format, "module"),
            ("device", config.device, "cpu"),
            ("precision", options.precision, "fp32"),
            ("compile", options.compile, False),
        ):
            if value != shared:
                problem = "is not for models that several workers share"
                raise ConfigError(field, value, problem, "leave it out, or give endpoint.num_workers=1")
        self._config, self._gang = config, gang
        layout = BatchLayout(config.signature, options)
        example = layout.to_model_shapes(
            make_example(layout.signature.inputs, min(NUM_EXAMPLES, options.max_batch_size or 1))
        )
        hook = find_hook("preprocess", factory, options)
        inputs: Arrays = example if hook is None else hook(example)
        self._plan = find_plan(factory, inputs, gang.split, gang.num_workers, config.bf16_inputs)
        has_rows = options.max_batch_size > 0 and None not in layout.dimensions.values()
        self._can_split = has_rows and not (config.has_preprocess or config.has_postprocess)
        self._dimensions = {name: dimension or 0 for name, dimension in layout.dimensions.items()}

    def load(self, snapshot: WeightSnapshot) -> Forward:
        assert isinstance(snapshot, WeightFile), "the loader of a gang hands on files"
        key = self._gang.load(lambda key: LoadVersion(key, self._config, self._plan, snapshot))
        forward = _GangForward(self._gang, key, self._dimensions if self._can_split else None)
        weakref.finalize(forward, self._gang.drop, key)
        return forward


class _GangForward:
    """One version's forward. Cuts a batch into micro-batches, so that every stage of a pipeline works.

    dimensions: of the batch, by tensor; None where a batch cannot be cut
    """

    def __init__(self, gang: Gang, key: int, dimensions: dict[str, int] | None) -> None:
        self._gang = gang
        self._key = key
        self._dimensions = dimensions
        self._most = MICRO_BATCHES_PER_STAGE * gang.num_workers if gang.split == "pipeline" else 1

    def __call__(self, inputs: Arrays) -> Arrays:
        dimensions = self._dimensions
        if dimensions is None or self._most == 1:
            return self._gang.run(self._key, [inputs])[0]
        first = next(iter(inputs))
        count = min(self._most, inputs[first].shape[dimensions[first]])
        parts = {name: np.array_split(array, count, dimensions[name]) for name, array in inputs.items()}
        batches = [{name: arrays[index] for name, arrays in parts.items()} for index in range(count)]
        outputs = self._gang.run(self._key, batches)
        if len(outputs) == 1:
            return outputs[0]
        return {name: np.concatenate([each[name] for each in outputs], dimensions[name]) for name in outputs[0]}
