"""Actors whose policy runs at the gateway: a game's, the ready one, and what they do when a side goes away."""

import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from msgspec.structs import replace

import shoal
from chase import LENGTHS, Chase
from loop.test_spaces_loop import EXPERIENCE as OF_SIGNS
from loop.test_spaces_loop import SPEC, SignGame
from rl_setting import EXPERIENCE, TOKEN, Parts, serving, weights
from shoal.actor import RemoteActor, RemoteClient
from shoal.actor.remote import run_remote_actor
from shoal.errors import Closed, ConfigError, InvalidSegment, Refused
from shoal.libs.games.tictactoe import TicTacToe
from shoal.rl.gateway.remote_inference import RemoteInference
from shoal.rl.learner import Learner
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, experience_spec
from shoal.testing import Loop
from shoal.weights import WeightSnapshot
from shoal.wire.action_masks import describe_masks
from shoal.wire.messages import ActMessage
from waiting import start_thread, wait_for


def connect(parts: Parts, **options: Any) -> RemoteActor:
    return shoal.connect(parts.address, token=TOKEN, actor_id="game", inference="remote", **options)


def observe(value: float) -> list[float]:
    return [value, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("inference", ["local", "remote"])
def test_two_episodes_at_once_become_a_segment_each(inference: str) -> None:
    with serving() as parts, shoal.connect(parts.address, token=TOKEN, actor_id="game", inference=inference) as actor:
        for step in range(3):
            assert actor.act(observe(step), "red") in (0, 1)
            actor.reward(0.5, "red")
            actor.reward(0.25, "red")
            actor.act(observe(-step), "blue")
        actor.end_episode(observe(9), episode="red", success=True)
        actor.end_episode(observe(-9), truncated=True, episode="blue")
        batch = parts.take(6, 6, 4)
        assert batch.observations[:, 0].tolist() == [0, 1, 2, 9, 0, -1, -2, -9]
        assert batch.rewards.tolist() == [0.75] * 3 + [0.0] * 3
        assert (batch.lengths.tolist(), batch.terminated.tolist()) == ([3, 3], [True, False])
        assert (batch.versions.tolist(), parts.gateway.stats()["episodes"]) == ([1] * 6, 2)
        assert parts.gateway.stats()["episode_spread"]["success_rate"] == 1.0


def test_what_a_game_may_not_do_is_an_error_and_its_episode_stays() -> None:
    with serving() as parts, connect(parts) as actor:
        with pytest.raises(ConfigError, match="has no action yet"):
            actor.reward(1.0)
        with pytest.raises(InvalidSegment, match="expected"):
            actor.act([0.0])
        actor.act(observe(0))
        for call in (actor.act, actor.end_episode):
            with pytest.raises(InvalidSegment, match=r"observation: 11\.0 is above 10\.0"):
                call(observe(11))
        actor.end_episode(observe(1))  # the episode has stayed
        assert parts.take().observations[:, 0].tolist() == [0, 1]
        parts.gateway.close(finished=True)
        with pytest.raises(Closed):
            actor.act(observe(0), "green")


def test_too_many_open_episodes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteInference.add_client, "__defaults__", (2,))
    with serving() as parts, connect(parts) as actor:
        for key in range(2):
            actor.act(observe(0), key)
        with pytest.raises(ConfigError, match="one too many"):
            actor.act(observe(0), 2)


def test_an_action_for_an_earlier_incarnation_is_not_sent_to_the_next_one() -> None:
    with serving() as parts:
        inference = parts.gateway._inference.start()
        is_free = threading.Event()

        def act_slowly(observations: np.ndarray, streams: object, masks: object) -> tuple[list[int], list[float]]:
            is_free.wait(60)
            return [int(each[0]) for each in observations], [-0.7] * len(observations)

        inference._policy.act_batch = act_slowly  # type: ignore[method-assign]
        before = RemoteClient(parts.address, TOKEN, "game")
        after = RemoteClient(parts.address, TOKEN, "game")
        try:
            before.connect()
            before.ask(ActMessage(0, 0), np.array(observe(0), np.float32).tobytes())
            wait_for(lambda: inference.get_counts()["open_episodes"])
            after.connect()  # as the game's next process does
            after.ask(ActMessage(0, 0), np.array(observe(1), np.float32).tobytes())
            is_free.set()
            assert after.wait_for_action(0, 0, 60.0).action == 1
        finally:
            is_free.set()
            before.close(0.0)
            after.close(0.0)


def test_an_episode_goes_on_at_a_gateway_that_has_restarted_with_its_whole_return(tmp_path: Path) -> None:
    with serving(tmp_path) as first, connect(first) as actor:
        for _ in range(3):
            actor.act(observe(1))
            actor.reward(1.0)
        first.gateway.close()
        with serving(tmp_path) as second:
            actor.act(observe(2))
            actor.reward(1.0)
            actor.end_episode(observe(3))
            assert actor.client.reconnects >= 1
            batch = second.take()
            assert batch.observations[:, 0].tolist() == [2, 3]  # the steps before were lost, and never counted
            assert list(second.gateway._progress.returns) == [4.0]


def test_another_run_that_takes_the_address_gets_the_steps_from_then_on() -> None:
    with serving() as parts, connect(parts) as actor:
        actor.act(observe(0))
        parts.gateway.close()
        with serving(port=parts.gateway.port, run_id="run-2") as other:
            actor.act(observe(1))
            actor.end_episode(observe(2))
            batch = other.take()
            assert batch.observations[:, 0].tolist() == [1, 2]


def test_a_gateway_that_does_not_infer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as parts:
        welcome = parts.gateway._handshake.make_welcome
        older = lambda session: replace(welcome(session), inference="local")  # noqa: E731
        monkeypatch.setattr(parts.gateway._handshake, "make_welcome", older)
        with pytest.raises(Refused, match="in the actor alone"):
            connect(parts)


def test_an_actor_waits_for_a_busy_learner_and_goes_on() -> None:
    with serving(queue_capacity=2) as parts, connect(parts) as actor:
        ended: list[int] = []

        def play() -> None:
            for number in range(6):
                actor.act(observe(number))
                actor.end_episode(observe(0))
                ended.append(number)

        game = start_thread(play)
        wait_for(lambda: len(parts.queue) == 2 and len(ended) == 2)
        parts.store.publish(weights(2))
        taken = []
        while len(taken) < 6:
            batch = parts.take(1, 1, 1)
            taken += batch.observations[::2, 0].tolist()
            parts.queue.acknowledge(batch.lease_id, [None])
        game.join(60)
        assert taken == [0, 1, 2, 3, 4, 5]
        assert not parts.ledger.get_totals().dropped


def test_each_agent_has_an_episode_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LENGTHS, "blue", 10)  # it observes the number of its steps, at most 10
    with serving() as parts:
        with RemoteClient(parts.address, TOKEN, "actor") as client:
            assert (
                run_remote_actor(Chase(has_turns=True), client, seed=1, max_steps=23) == 23
            )  # one episode of each agent
        batch = parts.take()
        order = np.argsort(batch.lengths)
        assert batch.lengths[order].tolist() == [5, 8, 10]
        assert batch.terminated[order].tolist() == [True, True, False]  # the last one is truncated
        ends, starts = np.cumsum(batch.lengths + 1), np.cumsum(batch.lengths)
        for number, length in enumerate(batch.lengths):
            seen = batch.observations[ends[number] - length - 1 : ends[number]]
            assert seen[:, 2].tolist() == list(range(length + 1))
            assert len(set(seen[:, 1].tolist())) == 1
            actions, rewards = (
                each[starts[number] - length : starts[number]] for each in (batch.actions, batch.rewards)
            )
            is_right = (actions == (seen[:-1, 0] > 0)).astype(np.float32)
            waited = rewards - is_right
            assert waited.max() > 0
            assert set((waited % 0.25).tolist()) == {0.0}
        parts.queue.acknowledge(batch.lease_id, [None] * 3)


def test_an_agent_without_a_policy_is_named() -> None:
    with serving() as parts, RemoteClient(parts.address, TOKEN, "actor") as client:
        assert client._welcome is not None
        client._welcome = replace(client._welcome, spec=replace(EXPERIENCE, agents=("red",)))
        with pytest.raises(ConfigError, match=r"green.*has no policy, nor have 1 other"):
            run_remote_actor(Chase(), client, max_steps=1)
        with pytest.raises(ConfigError, match="has one agent, and this run has several: red"):
            run_remote_actor(SignGame(), client, max_steps=1)


def start_player(loop: LocalLoop, index: int) -> threading.Thread:
    def run() -> None:
        with RemoteClient(loop.address, TOKEN, f"actor-{index}", timeout_s=60) as client:
            run_remote_actor(SignGame(), client, seed=index)

    thread = start_thread(run)
    return thread


def test_the_actions_go_on_while_the_learner_restarts(tmp_path: Path) -> None:
    spec = SPEC.override(["gateway.queue_capacity=10000"])  # a full queue would stop the actions, too
    loop = LocalLoop(spec, OF_SIGNS, tmp_path / "run", TOKEN)
    with loop:
        players = [start_player(loop, index) for index in range(2)]
        wait_for(lambda: loop.learner.updates > 3)
        loop.learner.finish(60)
        stopped, version = loop.gateway.stats(), loop.learner.version

        def count_actions() -> int:
            return int(loop.gateway.stats()["remote_inference"]["actions"])

        wait_for(lambda: count_actions() > stopped["remote_inference"]["actions"] + 100)
        loop.learner = Learner(spec, OF_SIGNS, loop.queue, loop.store, tmp_path / "run" / "checkpoints", version)
        loop.learner.thread.start()
        wait_for(lambda: any(actor["weights_version"] > version + 3 for actor in loop.gateway.stats()["actors"]))
    for player in players:
        player.join(60)
        assert not player.is_alive()
    assert loop.ledger.get_totals().is_balanced


def test_the_actions_of_a_box_are_arrays() -> None:
    spec = RLSpec().override(["algorithm=ppo"])
    space = gymnasium.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 2], np.float32))
    experience = experience_spec(gymnasium.spaces.Box(-1, 1, (4,), np.float32), space, spec)
    size = {"policy.0": (64, 4), "policy.2": (64, 64), "policy.4": (2, 64)}
    arrays = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in size.items()}
    arrays |= {f"{name}.bias": np.zeros(shape[0], np.float32) for name, shape in size.items()}
    with serving(experience=experience) as parts:
        parts.store.publish(WeightSnapshot.of(2, {**arrays, "log_std": np.zeros(2, np.float32)}))
        wait_for(lambda: parts.gateway.stats()["weights_version"] == 2)
        with connect(parts) as actor:
            action = actor.act(observe(0))
            assert (action.shape, action.dtype) == ((2,), np.float32)
            assert space.contains(action)
            actor.end_episode(observe(0))
            batch = parts.take()
            np.testing.assert_array_equal(batch.actions[0], action)


class LegalTicTacToe(TicTacToe):
    """Refuses a field that is taken."""

    def step(self, action: int) -> Any:
        assert not self._fields[:, action].any()
        return super().step(action)


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("dqn", marks=pytest.mark.soak)])
def test_action_masks_travel_with_the_observations(tmp_path: Path, algorithm: str) -> None:
    words = f"algorithm={algorithm}", "segment_length=3", "learner.batch_steps=64"
    with Loop(f"{__name__}:LegalTicTacToe", tmp_path, *words, inference="remote") as loop:
        loop.start_actor(seed=0)
        loop.learn(2)
        with RemoteClient(loop.address, TOKEN, "careless") as client:
            actor = RemoteActor(client)
            board, allowed = np.zeros(18, np.uint8), np.eye(9, dtype=np.int8)[4]
            assert actor.act(board, mask=allowed) == 4
            with pytest.raises(ConfigError, match="is missing in info"):
                actor.act(board)
            with pytest.raises(InvalidSegment, match="no action is allowed"):
                actor.act(board, mask=np.zeros(9, np.int8))
            for mask in (None, np.zeros(9, np.bool_).tobytes(), b"\2" * 9):  # of a client that does not check
                client.ask(ActMessage(10_000, 0), board.tobytes(), mask)
                assert client.wait_for_action(10_000, 0).reason == "invalid"
    totals = loop.ledger.get_totals()
    assert totals.is_balanced
    assert set(totals.dropped) <= {"shutdown", "stale_admission", "stale_consumption"}


@pytest.mark.parametrize("inference", ["local", "remote"])
def test_a_truncated_episode_ends_with_the_mask_of_its_last_observation(inference: str) -> None:
    """From which the learner estimates what would have followed."""
    experience = replace(EXPERIENCE, extras=(describe_masks(EXPERIENCE.action, ()),))
    with (
        serving(experience=experience) as parts,
        shoal.connect(parts.address, token=TOKEN, actor_id="game", inference=inference) as actor,
    ):
        actor.act(observe(0), mask=[1, 0])
        actor.end_episode(observe(1), truncated=True, mask=[0, 1])
        actor.act(observe(0), mask=[1, 0])
        actor.end_episode(observe(1))
        masks = [parts.take(1, 1, 1).extras["masks"].tolist() for _ in range(2)]
        assert masks == [[[True, False], [False, True]], [[True, False], [True, True]]]
