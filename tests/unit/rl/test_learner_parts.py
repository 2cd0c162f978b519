"""What a learner holds, each by itself: leases, versions, checks of batches, and a loop that pauses."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rl_setting import EXPERIENCE as OTHER_MODEL
from rl_setting import segment
from shoal import checkpoint
from shoal.errors import Closed, ConfigError, LedgerUnwritable
from shoal.extend.contracts import AlgorithmContract
from shoal.rl import batch_lease
from shoal.rl.algorithm_config import ImpalaConfig, PPOConfig
from shoal.rl.algorithms.algorithm import Algorithm, NonFiniteLoss, make_algorithm
from shoal.rl.batch_checks import CHECK_INTERVAL_S, CHECKED_STEPS, BadBatchPolicy, EvidenceCheck
from shoal.rl.batch_lease import BatchLease
from shoal.rl.experience.queue import BatchRequest, ExperienceBatch
from shoal.rl.learner import LearnerCheckpoints, model_arrays
from shoal.rl.part_specs import LearnerSpec
from shoal.rl.pausable_loop import PausableLoop
from shoal.rl.published_versions import VERSIONS_RESERVED, PublishedVersions
from shoal.rl.spec import RLSpec, policy_spec
from shoal.weights import WeightSnapshot, WeightStore
from shoal.wire import DropReason, ExperienceSpec, TensorSpec
from waiting import start_thread, wait_for

WEIGHTS = {"w": np.zeros(1, np.float32)}
STALE, BAD = DropReason.STALE_CONSUMPTION, DropReason.NON_FINITE


def batch(*versions: int, length: int = 8, bad: Sequence[int] = ()) -> ExperienceBatch:
    """Segments of these versions; the rewards of those at `bad` are infinite."""
    rewards = {number: np.full(length, np.inf, np.float32) for number in bad}
    segments = [
        segment(length, version, rewards=rewards.get(number, np.ones(length, np.float32)))
        for number, version in enumerate(versions)
    ]
    return ExperienceBatch.from_segments(1, segments)


class Updates:
    """Learns from batches whose rewards are finite."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.policy = BadBatchPolicy(3, self.update, lambda each: bool(np.isfinite(each.rewards).all()))

    def update(self, each: ExperienceBatch) -> bool:
        self.sizes.append(len(each.lengths))
        return bool(np.isfinite(each.rewards).all())


@pytest.mark.parametrize(
    ("given", "outcomes", "sizes"),
    [
        (batch(9, 9), [None, None], [2]),
        (batch(9, 5, 6), [None, STALE, None], [2]),
        (batch(9, 5, 9, bad=[2]), [None, STALE, BAD], [2, 1]),
        (batch(9, 9, bad=[0, 1]), [BAD, BAD], [2]),
        (batch(1, 2), [STALE, STALE], []),
    ],
)
def test_a_segment_is_dropped_for_its_own_reason(
    given: ExperienceBatch, outcomes: list[DropReason | None], sizes: list[int]
) -> None:
    updates = Updates()
    assert updates.policy.learn(given, 9 - given.oldest_versions(), 0.0) == outcomes
    assert updates.sizes == sizes


def test_a_run_ends_after_three_bad_batches_and_thirty_seconds_without_a_good_one() -> None:
    policy = Updates().policy
    for now in (0.0, 10.0, 29.9):
        policy.learn(batch(9, bad=[0]), np.array([0]), now)
        policy.require_progress(now)
    with pytest.raises(NonFiniteLoss, match="3 batches in a row"):
        policy.require_progress(30.0)
    policy.learn(batch(1), np.array([8]), 31.0)  # of old segments alone, which says nothing
    with pytest.raises(NonFiniteLoss):
        policy.require_progress(31.0)
    policy.learn(batch(9), np.array([0]), 32.0)
    policy.require_progress(1e9)
    policy.learn(batch(9, bad=[0]), np.array([0]), 1e9)
    policy.require_progress(2e9)  # the first one in a row


def check(log_ratio: float, sizes: list[int] | None = None) -> EvidenceCheck:
    def compute_log_ratios(sample: ExperienceBatch) -> np.ndarray:
        if sizes is not None:
            sizes.append(sample.num_steps)
        return np.full(sample.num_steps, log_ratio)

    return EvidenceCheck(compute_log_ratios, seed=-1)


def test_evidence_is_of_a_sample_and_not_of_each_batch() -> None:
    sizes: list[int] = []
    checked = check(1.0, sizes)
    found = np.array(checked.score(batch(*[1] * 100), 0.0))
    assert sizes == [CHECKED_STEPS]
    assert ((found > 0).sum(), (found == 0).sum()) == (32, 68)
    assert checked.score(batch(1), CHECK_INTERVAL_S / 2) == []
    assert len(checked.score(batch(1), 2 * CHECK_INTERVAL_S)) == 1


def test_evidence_of_an_honest_actor_is_not_above_0_and_of_weights_that_are_not_finite_is_none() -> None:
    assert check(0.0).score(batch(1, 1), 0.0) == pytest.approx([0.0, 0.0], abs=1e-3)
    assert check(float("nan")).score(batch(1, 1), 0.0) == [0.0, 0.0]


class FakeSource:
    """A source of these batches. The results of acknowledgements are `answers`."""

    def __init__(self, batches: list[ExperienceBatch | None], answers: Sequence[bool | Exception] = ()) -> None:
        self.batches, self.answers = batches, list(answers)
        self.requests: list[BatchRequest] = []
        self.acknowledged: list[tuple[int, Sequence[DropReason | None], Sequence[float]]] = []

    def take(self, consumer: str, request: BatchRequest) -> ExperienceBatch | None:
        self.requests.append(request)
        return self.batches.pop(0)

    def acknowledge(self, lease_id: int, outcomes: Sequence[DropReason | None], evidence: Sequence[float] = ()) -> bool:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        self.acknowledged.append((lease_id, outcomes, evidence))
        return answer


def lease_of(source: FakeSource, timeout_s: float = 10.0) -> BatchLease:
    return BatchLease(source, BatchRequest(16, 32, 4, timeout_s))


def test_a_lease_waits_in_pieces_and_takes_a_smaller_batch_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(batch_lease.time, "monotonic", lambda: now[0])
    source = FakeSource([None, None, batch(1), None])
    lease = lease_of(source, timeout_s=2.5)
    for _ in range(2):
        assert lease.take(version=7, max_steps=32) is None
        now[0] += 1.0
    assert lease.take(version=7, max_steps=32) is not None
    assert [(each.number, each.timeout_s, each.is_patient, each.version) for each in source.requests] == [
        (1, 1.0, True, 7),
        (2, 1.0, True, 7),
        (3, 0.5, False, 7),
    ]
    lease.take(version=0, max_steps=32)
    assert source.requests[-1].is_patient  # for the next batch there is all of the time
    assert lease.request.number == 4


def test_outcomes_that_cannot_be_recorded_are_reported_again() -> None:
    source = FakeSource([], [LedgerUnwritable("full"), True])
    lease = lease_of(source)
    lease.set_outcomes(batch(1), [None], [0.5])
    with pytest.raises(LedgerUnwritable):
        lease.acknowledge()
    assert lease.outcomes is not None
    lease.acknowledge()
    assert lease.outcomes is None
    assert source.acknowledged == [(1, [None], [0.5])]


def test_a_lease_that_another_incarnation_has_revoked_is_superseded() -> None:
    lease = lease_of(FakeSource([], [False]))
    lease.set_outcomes(batch(1), [None], [])
    with pytest.raises(Closed):
        lease.acknowledge()
    assert lease.is_superseded
    assert lease.outcomes is None


def versions_of(folder: Path, after: int = 0, is_known: bool = False) -> tuple[PublishedVersions, WeightStore]:
    store = WeightStore()
    return PublishedVersions(store, folder / "reserved", after, is_known), store


def test_numbers_of_versions_are_above_those_that_were_used_or_reserved(tmp_path: Path) -> None:
    first, store = versions_of(tmp_path)
    for number in range(1, 4):
        first.publish(WEIGHTS, updates=number, steps=8 * number)
    assert (first.version, first.updates, store.version) == (3, 3, 3)
    assert [(each.version, each.step) for each in first.take(0)] == [(1, 8), (2, 16), (3, 24)]
    assert first.take(3) == []
    assert versions_of(tmp_path, after=3, is_known=True)[0].version == 3
    assert versions_of(tmp_path, after=3)[0].version == 1 + VERSIONS_RESERVED
    assert versions_of(tmp_path, after=1000)[0].version == 1000


def test_versions_that_nobody_recorded_survive_their_learner(tmp_path: Path) -> None:
    killed, store = versions_of(tmp_path)
    for number in range(1, 4):
        killed.publish(WEIGHTS, updates=number, steps=8 * number)
    assert [each.version for each in killed.take(1)] == [2, 3]
    next_one, _ = versions_of(tmp_path)
    next_one.publish(WEIGHTS, updates=3, steps=24)
    latest = store.latest()
    assert latest is not None
    assert [each.version for each in next_one.take(0)] == [2, 3, next_one.version]
    assert next_one.take(0)[1] == (3, 24, latest.sha256, latest.published_at)


def test_numbers_that_are_skipped_do_not_count_as_lag(tmp_path: Path) -> None:
    """Twice the learner goes on from a checkpoint: from version 40, and from the second one after that."""
    once = PublishedVersions(WeightStore(), tmp_path / "a", 1_000_040, True, restored=40)
    for number in range(3):
        once.publish(WEIGHTS, updates=number, steps=0)
    seen = np.array([30, 40, 41, 90, 1_000_041, 1_000_043])
    assert once.measure_lag(seen).tolist() == [13, 3, 3, 3, 2, 0]
    store = WeightStore()
    twice = PublishedVersions(store, tmp_path / "b", 2_000_042, True, restored=1_000_042, skipped=once.skipped)
    twice.publish(WEIGHTS, updates=4, steps=0)
    assert twice.measure_lag(np.array([40, 41, 1_000_041, 1_000_043, 2_000_043])).tolist() == [3, 3, 2, 1, 0]
    latest = store.latest()
    assert latest is not None
    assert latest.measure_lag(40) == 3
    assert WeightSnapshot.of(7, WEIGHTS).measure_lag(4) == 3


def test_nothing_is_published_while_no_number_can_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions, store = versions_of(tmp_path)
    with monkeypatch.context() as full:
        full.setattr("shoal.atomic_file.replace_synced", raising(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            versions.publish(WEIGHTS, updates=1, steps=8)
    assert (versions.version, versions.updates, store.version) == (0, 0, 0)
    assert versions.is_due(1e9)  # none was published yet
    versions.publish(WEIGHTS, updates=1, steps=8)
    assert not versions.is_due(1e9)
    assert isinstance(store.latest(), WeightSnapshot)


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_loop_is_paused_between_two_steps_and_goes_on() -> None:
    steps: list[int] = []
    loop = PausableLoop(lambda: steps.append(1))
    thread = start_thread(loop.run)
    wait_for(lambda: len(steps) > 3)
    ready = iter([None, None, 7])
    assert loop.pause(lambda: next(ready), interval_s=0.001) == 7
    paused_at = len(steps)
    loop.wait(0.05)
    assert len(steps) == paused_at
    loop.resume()
    wait_for(lambda: len(steps) > paused_at)
    loop.stop()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(Closed):
        loop.pause(lambda: 1, interval_s=0.001)


def test_a_checkpoint_is_due_when_something_has_changed_and_the_interval_is_over(tmp_path: Path) -> None:
    checkpoints = LearnerCheckpoints(tmp_path, LearnerSpec(checkpoint_every_s=1e-9))
    assert checkpoints.load() is None
    assert checkpoints.is_due((3, 1))
    checkpoints.save((3, 1), {"updates": 3, "w": torch.zeros(1)})
    assert not checkpoints.is_due((3, 1))
    checkpoints._cost_s = 1000.0  # a tenth of the time goes to saving, at most
    checkpoints._saved_at -= 8000.0
    assert not checkpoints.is_due((3, 2))
    checkpoints._saved_at -= 1000.0
    assert checkpoints.is_due((3, 2))
    again = LearnerCheckpoints(tmp_path, LearnerSpec(checkpoint_every_s=1000.0))
    state = again.load()
    assert state is not None
    assert (state["updates"], again.restored_updates, again.damaged) == (3, 3, [])
    assert not again.is_due((4, 2))  # the interval begins with the learner


class TestImpala(AlgorithmContract):
    config = ImpalaConfig(epochs=1)


class TestPPO(AlgorithmContract):
    config = PPOConfig(epochs=1)


# -- the device: a GPU where there is one, refused by name where there is none


DISCRETE = msgspec.structs.replace(OTHER_MODEL, policy=policy_spec((8,)))
BOX = ExperienceSpec(
    OTHER_MODEL.observation,
    TensorSpec("float32", (2,), -1.0, 1.0),
    16,
    msgspec.structs.replace(policy_spec((8,), True), action_low=(-1.0, -1.0), action_high=(1.0, 1.0)),
)
SPACES = {"impala": DISCRETE, "ppo": DISCRETE, "dqn": DISCRETE, "sac": BOX}


def make(name: str, device: str) -> Algorithm:
    torch.manual_seed(0)
    words = [f"algorithm={name}", f"learner.device={device}"]
    if name in ("dqn", "sac"):
        words += ["algorithm.replay_mb=0.1", "algorithm.learning_starts=1", "algorithm.batch_size=16"]
    return make_algorithm(RLSpec(hidden=(8,)).override(words), SPACES[name])


def make_batch(name: str) -> ExperienceBatch:
    random = np.random.default_rng(0)
    discrete = SPACES[name] is DISCRETE
    return ExperienceBatch.from_segments(
        1,
        [
            segment(
                8,
                observations=random.normal(size=(9, 4)).astype(np.float32),
                actions=random.integers(0, 2, 8) if discrete else random.uniform(-0.9, 0.9, (8, 2)).astype(np.float32),
                rewards=random.normal(size=8).astype(np.float32),
            )
            for _ in range(4)
        ],
    )


def learn(name: str, device: str) -> Algorithm:
    algorithm = make(name, device)
    for _ in range(3):
        assert all(np.isfinite(list(metrics.values())).all() for metrics in algorithm.update(make_batch(name)))
    return algorithm


@pytest.mark.parametrize("name", SPACES)
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert make(name, "auto").device == make(name, "cpu").device == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"learner.device = 'cuda': torch finds no GPU where the learner runs"):
        make(name, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", SPACES)
def test_a_gpu_learns_what_a_cpu_learns_and_its_checkpoint_is_read_without_one(name: str, tmp_path: Path) -> None:
    on_gpu, on_cpu = learn(name, "cuda"), learn(name, "cpu")
    assert all(parameter.is_cuda for parameter in on_gpu.model.parameters())
    for key, value in model_arrays(on_gpu.model).items():
        np.testing.assert_allclose(value, model_arrays(on_cpu.model)[key], rtol=1e-2, atol=1e-4)
    checkpoint.save(tmp_path, 1, on_gpu.state_dict())
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    resumed = make(name, "cpu")
    resumed.load_state_dict(loaded.state)
    for key, value in model_arrays(resumed.model).items():
        np.testing.assert_array_equal(value, model_arrays(on_gpu.model)[key])
    assert list(resumed.update(make_batch(name)))
