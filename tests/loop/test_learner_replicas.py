"""Several learners that share each batch: their weights are those of one learner, whoever of them dies or joins."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rl_setting import segment
from shoal.rl import learner_group
from shoal.rl.experience.queue import ExperienceBatch, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.learner import Learner
from shoal.rl.learner_group import HubLink, LearnerHub
from shoal.rl.learner_replica import LearnerReplica
from shoal.rl.spec import RLSpec, experience_spec
from shoal.weights import WeightStore
from shoal.wire import ExperienceSpec
from waiting import wait_for

A = ("a", 1)
HOST = "127.0.0.1"
# Float32 sums in another order, and Adam's quotients of them, over 5 batches.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
ALGORITHMS = {
    "impala": ["algorithm=impala", "algorithm.epochs=2", "algorithm.minibatch_steps=16"],
    "impala-plain": ["algorithm=impala", "algorithm.epochs=2", "algorithm.normalize_advantages=false"],
    "impala-gru": ["algorithm=impala", "algorithm.minibatch_steps=16", "core=gru", "core_size=6"],
    "ppo": ["algorithm=ppo", "algorithm.epochs=2", "algorithm.minibatch_steps=16"],
    "ppo-lstm": ["algorithm=ppo", "algorithm.epochs=2", "algorithm.minibatch_steps=16", "core=lstm", "core_size=6"],
    "dqn": [
        "algorithm=dqn",
        "algorithm.batch_size=32",
        "algorithm.learning_starts=90",
        "algorithm.samples_per_insert=2",
    ],
    "r2d2": [
        *("algorithm=r2d2", "algorithm.batch_size=8", "algorithm.learning_starts=90", "algorithm.sequence_length=5"),
        *("algorithm.burn_in=2", "core_size=6", "algorithm.target_update_period=4"),
    ],
    "sac": [
        "algorithm=sac",
        "algorithm.batch_size=31",
        "algorithm.learning_starts=90",
        "algorithm.updates_per_step=0.1",
    ],
}
OFF_POLICY = ["dqn", *(pytest.param(each, marks=pytest.mark.soak) for each in ("r2d2", "sac"))]


def make_spec(*words: str) -> RLSpec:
    small = (
        "learner.batch_steps=48",
        "learner.max_batch_steps=48",
        "learner.take_timeout_s=0.05",
        "learner.publish_interval_s=0",
    )
    return RLSpec(hidden=(8,), segment_length=16).override([*small, "gateway.max_version_lag=1000", *words])


def describe(spec: RLSpec) -> ExperienceSpec:
    actions = Box(-1, 1, (1,)) if spec.algorithm.name == "sac" else Discrete(2)
    return experience_spec(Box(-10, 10, (4,)), actions, spec)


def run_replica(spec: RLSpec, *hubs: LearnerHub) -> None:
    """Join these hubs, one after the other."""
    for hub in hubs:
        hub._listener._server.close()  # the forked process has a copy
    addresses = [hub.address for hub in hubs]
    LearnerReplica(spec, describe(spec)).run(lambda: HubLink(addresses.pop(0)) if addresses else None)


def wait_for_member(hub: LearnerHub) -> None:
    """Until another learner has joined."""
    before = len(hub.pids)
    wait_for(lambda: hub._admit() or len(hub.pids) > before)


class Bench:
    """A learner with its queue, and replicas of it in processes of their own."""

    def __init__(self, folder: Path, *words: str, replicas: int = 0, hub: LearnerHub | None = None) -> None:
        self.spec = make_spec(*words)
        self.queue = ExperienceQueue(64, Ledger())
        self.hub = LearnerHub(HOST) if replicas else hub
        self.learner = Learner(self.spec, describe(self.spec), self.queue, WeightStore(), folder, hub=self.hub)
        self.processes: list[BaseProcess] = []
        for _ in range(replicas):
            self.start_replica()

    def start_replica(self, *later: LearnerHub) -> BaseProcess:
        assert self.hub is not None
        started = multiprocessing.get_context("fork").Process(target=run_replica, args=(self.spec, self.hub, *later))
        started.start()
        self.processes.append(started)
        wait_for_member(self.hub)
        return started

    def learn(self, random: np.random.Generator, num_batches: int) -> None:
        """From segments of 3 to 16 steps, without an equal division."""
        for _ in range(num_batches):
            while self.queue.num_steps < 48:
                made = random_segment(random, self.spec)
                self.queue.put(A, self.queue.ledger.get_account(A).next_seq, made)
            assert self.learner.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return self.learner.model.state_dict()


@contextmanager
def bench(folder: Path, *words: str, replicas: int = 0, hub: LearnerHub | None = None) -> Iterator[Bench]:
    made = Bench(folder, *words, replicas=replicas, hub=hub)
    try:
        yield made
    finally:
        if made.hub is not None:
            made.hub.close()
        for process in made.processes:
            process.join(30)
            assert process.exitcode is not None
        made.queue.ledger.close()


def random_segment(random: np.random.Generator, spec: RLSpec) -> object:
    length = int(random.integers(3, 17))
    is_box, states = spec.algorithm.name == "sac", random.uniform(-1, 1, (1, spec.state_size)).astype(np.float32)
    return segment(
        length,
        1,
        observations=random.normal(size=(length + 1, 4)).astype(np.float32),
        actions=random.uniform(-1, 1, (length, 1)).astype(np.float32) if is_box else random.integers(0, 2, length),
        rewards=random.normal(size=length).astype(np.float32),
        terminated=False,
        **({"extras": {"state": states}} if spec.state_size else {}),
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[pytest.mark.soak] * (each in ("impala", "impala-gru", "ppo", "r2d2")))
        for each in ALGORITHMS
    ],
)
def test_three_learners_have_the_weights_of_one(tmp_path: Path, name: str) -> None:
    with bench(tmp_path / "one", *ALGORITHMS[name]) as one:
        one.learn(np.random.default_rng(3), 5)
        with bench(tmp_path / "three", *ALGORITHMS[name], replicas=2) as three:
            three.learn(np.random.default_rng(3), 5)
            assert three.learner.stats()["metrics"]["learner/replicas"] == 3.0
            for key, value in one.weights().items():
                torch.testing.assert_close(three.weights()[key], value, **TOLERANCE)
            for key, value in one.learner.stats()["metrics"].items():
                if not key.endswith("_ms"):
                    assert three.learner.stats()["metrics"][key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
            assert three.queue.ledger.get_account(A).consumed == one.queue.ledger.get_account(A).consumed


@pytest.mark.parametrize("name", OFF_POLICY)
def test_what_is_not_finite_any_more_leaves_the_replay_of_several_learners(tmp_path: Path, name: str) -> None:
    with bench(tmp_path, *ALGORITHMS[name], replicas=1) as two:
        random = np.random.default_rng(3)
        two.learn(random, 3)
        replay = two.learner.algorithm._replay  # type: ignore[attr-defined]
        replay._arrays["rewards"][0] = 3e38
        first = np.array([0])
        updates = two.learner.updates
        while replay._tree.get(first)[0]:
            two.learn(random, 1)
        two.learn(random, 2)
        assert two.learner.updates > updates
        assert two.learner.stats()["metrics"]["learner/replicas"] == 2.0
        assert two.processes[0].is_alive()


class Cloned:
    """What was shown: one segment, which comes before the second batch."""

    def __init__(self) -> None:
        self._segment, self._due = segment(8, behaviour="human"), iter([0, 3, 0, 0])

    def advance(self, num_steps: int) -> None: ...

    def take_cloning_steps(self) -> int:
        return next(self._due)

    def compute_loss(
        self, compute_log_pi: Callable[[list[object]], torch.Tensor], differentiate: Callable[[torch.Tensor], bool]
    ) -> dict[str, float]:
        assert differentiate(-compute_log_pi([self._segment]).mean())
        return {"learner/cloning_loss": 1.0}


def test_two_learners_clone_what_was_shown_to_the_first_as_one_does(tmp_path: Path) -> None:
    with bench(tmp_path / "one") as one, bench(tmp_path / "two", replicas=1) as two:
        for each in (one, two):
            each.learner.algorithm.demonstrations = Cloned()  # type: ignore[assignment]
            each.learn(np.random.default_rng(3), 4)
        for key, value in one.weights().items():
            torch.testing.assert_close(two.weights()[key], value, **TOLERANCE)


class DyingHub(LearnerHub):
    """One learner dies in the middle of a batch: after its first sum."""

    victim: BaseProcess | None = None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        total = super().sum(values)
        if self.victim is not None:
            os.kill(self.victim.pid or 0, signal.SIGKILL)
            self.victim.join()
            self.victim = None
        return total


def test_the_others_join_the_first_learner_again_when_it_has_come_back_from_its_checkpoint(tmp_path: Path) -> None:
    with bench(tmp_path / "one") as one:
        one.learn(np.random.default_rng(3), 5)
    random, second_hub = np.random.default_rng(3), LearnerHub(HOST)
    with bench(tmp_path / "run", hub=LearnerHub(HOST)) as first:
        first.start_replica(second_hub)
        first.learn(random, 3)
        first.learner.save()
        assert first.hub is not None
        first.hub.close()  # as its death does
        with bench(tmp_path / "run", hub=second_hub) as again:
            assert again.learner.restored_updates == 3
            wait_for_member(second_hub)
            again.learn(random, 2)
            assert again.learner.stats()["replica_pids"] == [first.processes[0].pid]
            for key, value in one.weights().items():
                torch.testing.assert_close(again.weights()[key], value, **TOLERANCE)
            assert again.queue.ledger.get_account(A).dropped == {}


def test_data_that_is_not_finite_is_dropped_by_all_alike(tmp_path: Path) -> None:
    with bench(tmp_path, replicas=1) as two:
        random = np.random.default_rng(3)
        two.learn(random, 1)
        bad = segment(16, 1, rewards=np.full(16, 3e38, np.float32))
        two.queue.put(A, two.queue.ledger.get_account(A).next_seq, bad)
        two.learn(random, 2)
        account = two.queue.ledger.get_account(A)
        assert account.dropped == {"non_finite": 1}
        assert two.learner.updates == 3
        assert len(two.hub.pids if two.hub else []) == 1


@pytest.mark.parametrize("name", ["ppo", *OFF_POLICY])
def test_a_learner_that_dies_within_a_batch_takes_its_share_with_it_but_of_a_replay_no_segment(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first learner alone has a replay: the others go on, and the replacement has its weights."""
    monkeypatch.setitem(globals(), "LearnerHub", DyingHub)
    with bench(tmp_path, *ALGORITHMS[name], replicas=2) as three:
        random = np.random.default_rng(3)
        three.learn(random, 3)
        before = three.learner.updates
        assert before > 0
        assert isinstance(three.hub, DyingHub)
        three.hub.victim = three.processes[1]
        three.learn(random, 1)
        assert len(three.hub.pids) == 1
        three.start_replica()
        three.learn(random, 2)
        assert len(three.hub.pids) == 2
        account = three.queue.ledger.get_account(A)
        assert account.is_balanced
        assert set(account.dropped) == ({"learner_crash"} if name == "ppo" else set())
        assert three.learner.updates > before
        assert all(value.isfinite().all() for value in three.weights().values())


@pytest.mark.parametrize("name", ["impala", *OFF_POLICY])
def test_a_learner_that_joins_late_has_the_weights_of_the_others(name: str, tmp_path: Path) -> None:
    with bench(tmp_path / "one", *ALGORITHMS[name]) as one:
        one.learn(np.random.default_rng(3), 6)
        with bench(tmp_path / "late", *ALGORITHMS[name], replicas=1) as late:
            random = np.random.default_rng(3)
            late.learn(random, 3)
            late.start_replica()
            late.learn(random, 3)
            for key, value in one.weights().items():
                torch.testing.assert_close(late.weights()[key], value, **TOLERANCE)


def test_a_replica_takes_no_memory_for_a_replay() -> None:
    """The first learner's may be on its disk, and larger than the memory."""
    spec = make_spec("algorithm=dqn", "algorithm.replay_mb=1e9", "algorithm.replay_on_disk=true")
    LearnerReplica(spec, describe(spec))


def test_a_share_knows_where_its_steps_are_in_the_batch() -> None:
    hub = LearnerHub(HOST)
    batch = ExperienceBatch.from_segments(1, [segment(3), segment(5)])
    share = hub.distribute(batch, bytes)
    assert share.num_steps == 8
    positions, num_steps = hub.locate(share)
    assert positions.tolist() == list(range(8))
    assert num_steps == 8
    hub.close()


def test_a_learner_that_reads_no_more_is_lost_and_the_hub_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that the system has stopped: its connection stays open."""
    monkeypatch.setattr(learner_group, "REPLY_TIMEOUT_S", 2)
    hub = LearnerHub(HOST)
    link = HubLink(hub.address)
    try:
        wait_for_member(hub)
        large = [segment(16) for _ in range(2)]
        batch = ExperienceBatch.from_segments(1, large)
        hub.distribute(batch, lambda: bytes(2**26))  # more than the kernel holds for a reader
        assert hub.lost.tolist().count(True) == 1
        assert hub.pids == []
    finally:
        link.close()
        hub.close()
