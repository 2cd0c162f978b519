"""DQN behind the gateway: it takes experience of any age, drops what is not finite, and resumes with its replay."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from rl_setting import EXPERIENCE, segment
from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.learner import Learner
from shoal.rl.spec import RLSpec
from shoal.weights import WeightStore

A = ("a", 1)
SPEC = RLSpec(hidden=(32,)).override(
    [
        "algorithm=dqn",
        "algorithm.discount=0",
        "algorithm.num_steps=1",
        "algorithm.batch_size=128",
        "algorithm.samples_per_insert=8",
        "algorithm.learning_rate=0.01",
        "algorithm.learning_starts=200",
        "algorithm.epsilon_steps=1000",
        "algorithm.epsilon=0.02",
        "algorithm.replay_mb=1",
        "learner.batch_steps=64",
        "learner.max_batch_steps=64",
        "learner.take_timeout_s=0.1",
        "learner.publish_interval_s=0",
    ]
)


EXPERIENCE_OF_DQN = msgspec.structs.replace(EXPERIENCE, policy=SPEC.algorithm.describe_policy(SPEC.hidden))


class Bench:
    """A learner and its queue."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.queue = ExperienceQueue(64, Ledger())
        self.learner = Learner(SPEC.override(words), EXPERIENCE_OF_DQN, self.queue, WeightStore(), folder, 500)

    def put(self, **changes: object) -> None:
        seq = self.queue.ledger.get_account(A).next_seq
        assert self.queue.put(A, seq, segment(16, **changes))

    def learn(self) -> None:
        for _ in range(4):
            self.put()
        assert self.learner.step()


def test_experience_of_any_age_is_consumed_when_it_is_inserted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "gateway.max_version_lag=3")
    bench.learn()  # by version 1; the learner is at 501
    account = bench.queue.ledger.get_account(A)
    assert (account.consumed, account.dropped) == (4, {})
    assert bench.learner.stats()["steps"] == 64
    assert bench.learner.updates == 0  # learning_starts is above it
    assert bench.learner.snapshot().tensors()["epsilon"] < 1
    for _ in range(3):
        bench.learn()
    assert bench.learner.updates == 4  # at 256 steps: 64 inserted ones allow 512 draws, which are 4 steps of 128


def test_a_segment_with_infinite_errors_is_dropped_and_the_others_are_inserted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "algorithm.discount=1", "algorithm.num_steps=3")
    for _ in range(3):
        bench.put()
    bench.put(rewards=np.full(16, 3e38, np.float32), observations=np.full((17, 4), 9, np.float32))
    assert bench.learner.step()
    account = bench.queue.ledger.get_account(A)
    assert (account.consumed, account.dropped) == (3, {"non_finite": 1})
    assert bench.learner.stats()["steps"] == 48
    assert bench.queue.take_unlearnable() == {A: 1}  # the gateway names the actor
    assert not bench.queue.take_unlearnable()
