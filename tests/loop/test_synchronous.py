"""PPO as in its paper: actors pause while the learner updates, and every step of a batch is of the newest weights."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gateway_asking import Raw
from hypothesis import given
from hypothesis import strategies as st

from rl_setting import EXPERIENCE as OTHER_MODEL
from rl_setting import TOKEN, segment
from shoal.actor import ActorClient
from shoal.actor.segment_builder import SegmentBuilder
from shoal.rl.experience.queue import BatchRequest, ExperienceBatch, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.gateway.sessions import grant_round_credit
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, policy_spec
from shoal.wire import ExtraSpec, Segment, TensorSpec
from shoal.wire.messages import Pull, WeightsMessage
from sign_game import SignGame
from waiting import start_thread, wait_for

PROGRAM = Path(__file__).parents[1] / "sign_game.py"
SPEC = RLSpec(hidden=(16,)).override(
    [
        "algorithm=ppo",
        "algorithm.synchronous=true",
        "algorithm.learning_rate=0.01",
        "learner.batch_steps=64",
        "learner.take_timeout_s=0.5",
        "gateway.heartbeat_s=0.2",
        "gateway.timeout_s=1",
    ]
)
EXPERIENCE = msgspec.structs.replace(OTHER_MODEL, policy=policy_spec(SPEC.hidden))


def start_actor(loop: LocalLoop, index: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(PROGRAM), loop.address, TOKEN, f"actor-{index}", str(index)])


def record_batches(loop: LocalLoop) -> list[tuple[int, np.ndarray]]:
    """(the learner's version, those of the steps) of each batch that it learns from."""
    batches: list[tuple[int, np.ndarray]] = []
    checks = loop.learner._bad_batches
    original = checks._update

    def update(batch: ExperienceBatch) -> bool:
        batches.append((loop.learner.version, batch.versions))
        return original(batch)

    checks._update = update
    return batches


def assert_no_lag(batches: list[tuple[int, np.ndarray]]) -> None:
    assert all((versions == version).all() for version, versions in batches)


def test_every_step_is_of_the_newest_weights_and_a_killed_actor_stops_nobody(tmp_path: Path) -> None:
    loop = LocalLoop(SPEC, EXPERIENCE, tmp_path / "run", TOKEN, target_return=7.0)
    batches = record_batches(loop)
    with loop:
        actors = [start_actor(loop, index) for index in range(3)]
        try:
            wait_for(lambda: len(batches) > 8)
            actors[0].kill()
            after_kill = len(batches)
            assert loop.wait_until_solved(timeout_s=600) > 0
            wait_for(lambda: len(batches) > after_kill + 8)
            assert loop.learner.stats()["metrics"]["learner/policy_lag"] == 0.0
        finally:
            for each in actors[1:]:
                each.terminate()
            for each in actors:
                each.wait()
    assert_no_lag(batches)
    sizes = np.array([len(versions) for _, versions in batches])
    assert sizes.max() < 64 + OTHER_MODEL.segment_length  # exactly one batch of credit, to within a segment
    assert np.mean(sizes >= 64) > 0.8  # smaller ones only while the gateway waits for the killed one
    dropped = loop.ledger.get_totals().dropped
    assert dropped.total() <= 3 * 3, dropped  # after a smaller batch, what came too late for it; and at the end


def test_an_actor_that_knows_nothing_of_pauses_is_dropped_where_it_lags_and_learnt_from_where_not(
    tmp_path: Path,
) -> None:
    """It sends each segment when it has credit, though it has played it with older weights."""
    loop = LocalLoop(SPEC, EXPERIENCE, tmp_path / "run", TOKEN)
    batches = record_batches(loop)
    with loop:

        def act() -> None:
            with ActorClient(loop.address, TOKEN, "old", timeout_s=60) as client:
                game, builder = SignGame(), SegmentBuilder(client.spec)
                version, _ = client.wait_for_weights()
                builder.begin(game.reset(seed=1)[0])
                while not client.finished:
                    newer = client.newer_weights(version)
                    version = newer[0] if newer else version
                    observation, reward, ended, _, _ = game.step(0)
                    done = builder.step(0, float(np.log(0.5)), version, reward, observation, ended, False)
                    if done is not None:
                        client.send(done, timeout_s=None)
                    if ended:
                        builder.begin(game.reset()[0])

        thread = start_thread(act)
        wait_for(lambda: len(batches) > 10)
    thread.join(60)
    assert_no_lag(batches)


def test_credit_waits_for_the_pull_that_says_that_the_weights_have_come(tmp_path: Path) -> None:
    with LocalLoop(SPEC, EXPERIENCE, tmp_path / "run", TOKEN) as loop, Raw(loop) as raw:  # type: ignore[arg-type]
        welcome = raw.enter()
        assert welcome.synchronous
        assert welcome.send_limit == 0
        raw.say(Pull(0))
        weights = raw.hear(WeightsMessage)
        assert raw.rest(quiet_s=0.3) == []
        raw.say(Pull(weights.version))
        limits = {message.send_limit for message in raw.rest(quiet_s=0.3)}  # type: ignore[union-attr]
        assert limits == {4}  # 64 steps are four segments


def test_actors_that_do_not_play_hold_up_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.rl.gateway.sessions.ROUND_LAPSE_S", 0.1)
    loop = LocalLoop(SPEC, EXPERIENCE, tmp_path / "run", TOKEN)
    batches = record_batches(loop)
    with loop, ExitStack() as idle:
        for number in range(20):  # five batches' segments
            idle.enter_context(ActorClient(loop.address, TOKEN, f"idle-{number}")).wait_for_weights()
        actor = start_actor(loop, 0)
        wait_for(lambda: len(batches) > 5)
        actor.terminate()
        actor.wait()
    assert_no_lag(batches)


@given(st.dictionaries(st.integers(), st.integers(0, 6), max_size=9), st.integers(-2, 40), st.integers(1, 8))
def test_a_batch_is_shared_out_exactly_and_evenly(open_credit: dict[int, int], missing: int, max_credits: int) -> None:
    grants = grant_round_credit(open_credit, missing, max_credits)
    room = sum(max(0, max_credits - credit) for credit in open_credit.values())
    assert sum(grants.values()) == max(0, min(missing, room))
    after = {session: credit + grants.get(session, 0) for session, credit in open_credit.items()}
    for session, grant in grants.items():
        assert grant > 0
        assert after[session] <= min(after.values()) + 1 or grant == 0


def test_what_came_too_late_for_a_batch_is_dropped_when_the_next_one_begins() -> None:
    queue, key = ExperienceQueue(8, Ledger()), ("a", 1)
    woken: list[int] = []
    queue.on_space_freed = lambda: woken.append(queue.awaited_version)
    assert queue.count_missing(8) == 0  # the learner waits for nothing yet
    for seq, version in enumerate((3, 4, 3)):
        queue.put(key, seq, segment(8, version=version))
    request = BatchRequest(32, 64, 8, 0.0, 1, is_patient=True, version=4)
    assert queue.take("learner", request) is None
    assert woken == [4]
    assert queue.ledger.get_account(key).dropped == {"stale_consumption": 2}
    assert queue.count_missing(8) == 3
    assert queue.count_missing(5) == 5
    batch = queue.take("learner", request._replace(number=2, is_patient=False))
    assert batch is not None
    assert batch.versions.tolist() == [4] * 8
    assert queue.count_missing(8) == 0  # none until the learner asks for the next version's
    assert queue.ledger.get_account(key).is_balanced
    queue.ledger.close()


def test_steps_that_are_given_up_stay_in_the_return_of_their_episode() -> None:
    number = TensorSpec("float32")
    extras = (ExtraSpec("state", number, "segment"), ExtraSpec("mask", number, "observation"))
    builder = SegmentBuilder(msgspec.structs.replace(OTHER_MODEL, extras=extras))
    rows = np.linspace(-1, 1, 4 * 4, dtype=np.float32).reshape(4, 4)
    builder.begin(rows[0], {"state": 0.0, "mask": 10.0})
    assert builder.is_empty
    builder.step(0, -0.5, 1, 10.0, rows[1], False, False, {"state": 1.0, "mask": 11.0})
    builder.discard_steps()
    assert builder.is_empty
    builder.step(1, -0.5, 2, 2.0, rows[2], False, False, {"state": 2.0, "mask": 12.0})
    done = builder.step(1, -0.5, 2, 3.0, rows[3], True, False, {"state": 3.0, "mask": 13.0})
    assert isinstance(done, Segment)
    np.testing.assert_array_equal(done.observations, rows[1:])
    assert done.versions.tolist() == [2, 2]
    assert (done.episode_return, done.episode_length) == (15.0, 3)
    assert {name: array.tolist() for name, array in done.extras.items()} == {"state": [1.0], "mask": [11.0, 12.0, 13.0]}


@pytest.mark.parametrize(("words", "expected"), [([], 5.0), (["learner.take_timeout_s=2"], 2.0)])
def test_a_learner_waits_longer_for_actors_that_pause(words: list[str], expected: float) -> None:
    spec = RLSpec().override(["algorithm=ppo", "algorithm.synchronous=true", *words])
    assert spec.take_timeout_s == expected
    assert spec.applied_gateway.max_version_lag == 0
    assert RLSpec().take_timeout_s == 60.0
