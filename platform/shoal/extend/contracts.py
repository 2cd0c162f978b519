"""Tests for a user's own test suite, to inherit: what Shoal expects of an algorithm, a tracker, a library.

    class TestReinforce(AlgorithmContract):
        config = ReinforceConfig()

pytest collects the methods of the subclass. Imports no pytest.
"""

from __future__ import annotations

import io
import math
from typing import Any, ClassVar

import numpy as np
import torch

from shoal.plugins.find import load_reference
from shoal.plugins.library import Library
from shoal.rl.algorithm_config import AlgorithmConfig
from shoal.rl.algorithms.algorithm import Algorithm, NonFiniteLoss, make_algorithm
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, policy_spec
from shoal.runs import Run, create, load
from shoal.runs.run_reader import MetricValue
from shoal.runs.tracker import Tracker
from shoal.wire import ExperienceSpec, TensorSpec


class AlgorithmContract:
    """An algorithm on random experience of a small game.

    config:           its fields; smaller than the defaults where these need much experience for a first step
    lengths:          of the segments of a batch; the last of them does not end its episode
    num_batches:      until it has taken a step; more than one for an algorithm that first fills a replay
    observation_size: numbers of an observation
    num_actions:      of a discrete action
    """

    config: ClassVar[AlgorithmConfig]
    lengths: ClassVar[tuple[int, ...]] = (5, 8, 3)
    num_batches: ClassVar[int] = 1
    observation_size: ClassVar[int] = 4
    num_actions: ClassVar[int] = 2

    def make(self) -> Algorithm:
        torch.manual_seed(0)
        spec = RLSpec(hidden=(8,), algorithm=self.config)
        observation = TensorSpec("float32", (self.observation_size,), -10.0, 10.0)
        action = TensorSpec("int64", (), 0, self.num_actions - 1)
        return make_algorithm(spec, ExperienceSpec(observation, action, 16, policy_spec(spec.hidden)))

    def make_batch(self, seed: int = 0, **changes: Any) -> ExperienceBatch:
        """Random segments. changes: arrays of the batch in place of these"""
        random, num_steps = np.random.default_rng(seed), sum(self.lengths)
        arrays = {
            "observations": random.normal(size=(num_steps + len(self.lengths), self.observation_size)).astype(
                np.float32
            ),
            "actions": random.integers(0, self.num_actions, num_steps),
            "rewards": random.normal(size=num_steps).astype(np.float32),
            "log_probabilities": np.full(num_steps, -math.log(self.num_actions), np.float32),
            "versions": np.ones(num_steps, np.int64),
            "lengths": np.array(self.lengths, np.int64),
            "terminated": np.arange(len(self.lengths)) < len(self.lengths) - 1,
        }
        return ExperienceBatch(lease_id=1, **{**arrays, **changes})

    def learn(self, algorithm: Algorithm, first_seed: int = 0) -> list[dict[str, float]]:
        """The metrics of the steps that `num_batches` batches lead to."""
        seeds = range(first_seed, first_seed + self.num_batches)
        batches = [algorithm.prepare(self.make_batch(seed)) for seed in seeds]
        return [dict(metrics) for batch in batches for metrics in algorithm.update(batch)]

    def test_a_step_changes_the_weights_and_has_finite_metrics(self) -> None:
        algorithm = self.make()
        before = [parameter.detach().clone() for parameter in algorithm.model.parameters()]
        steps = self.learn(algorithm)
        assert steps
        assert all(math.isfinite(value) for metrics in steps for value in metrics.values())
        after = list(algorithm.model.parameters())
        assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))

    def test_a_batch_without_a_finite_loss_changes_no_weights(self) -> None:
        algorithm = self.make()
        before = [parameter.detach().clone() for parameter in algorithm.model.parameters()]
        bad = algorithm.prepare(self.make_batch(rewards=np.full(sum(self.lengths), np.nan, np.float32)))
        assert not algorithm.is_usable(bad)
        try:
            steps = list(algorithm.update(bad))
        except NonFiniteLoss:
            steps = []
        assert not steps
        assert all(torch.equal(old, new) for old, new in zip(before, algorithm.model.parameters(), strict=True))

    def test_a_restored_algorithm_takes_the_same_step(self) -> None:
        one, other = self.make(), self.make()
        self.learn(one)
        state = torch.load(io.BytesIO(one.serialize()), weights_only=True)
        assert {"model", "normalizer"} <= state.keys()
        other.load_state_dict(state)
        results = []
        for algorithm in (one, other):
            torch.manual_seed(2)
            results.append(self.learn(algorithm, first_seed=100))
        assert results[0] == results[1]
        for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


class TrackerContract:
    """A tracker that receives a short run. $SHOAL_HOME is where the run lies.

    tracker: the class
    """

    tracker: ClassVar[type[Tracker]]

    def make_run(self) -> Run:
        with create("contract", "task: none") as recorder:
            recorder.log(1, {"train/loss": 0.5})
        return load(recorder.id)

    def test_it_takes_a_run_from_its_beginning_to_its_end(self) -> None:
        run, tracker = self.make_run(), self.tracker()
        tracker_run, address = tracker.begin(run, "")
        assert isinstance(tracker_run, str)
        assert isinstance(address, str)
        tracker.send([MetricValue(1, "train/loss", 1.0, 0.5)])
        tracker.finish(run)

    def test_it_goes_on_with_a_run_that_it_has(self) -> None:
        run = self.make_run()
        first = self.tracker()
        second = self.tracker()
        tracker_run, _ = first.begin(run, "")
        first.finish(run)
        assert second.begin(run, tracker_run)[0] == tracker_run
        second.finish(run)


class LibraryContract:
    """library: what its module declares"""

    library: ClassVar[Library]

    def test_what_it_names_can_be_imported(self) -> None:
        words = [reference for group in self.library.extensions.values() for reference in group.values()]
        for reference in [*words, *(command for command, _ in self.library.verbs.values())]:
            load_reference(reference)
