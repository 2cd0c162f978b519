"""People and scripts that show how: what they do is kept and learnt from, and is never taken for the policy's."""

import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from demonstration_case import read_all

import shoal
from rl_setting import EXPERIENCE as OTHER_MODEL
from rl_setting import TOKEN, serving
from shoal.actor.game import EpisodeActor
from shoal.errors import ConfigError
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, policy_spec
from shoal.wire import DropReason
from sign_game import SignGame
from waiting import wait_for

PAGE = Path(__file__).parents[3] / "docs/games/demonstrations.md"
SPEC = RLSpec(hidden=(16,)).override(["learner.batch_steps=64", "learner.take_timeout_s=0.1"])
EXPERIENCE = msgspec.structs.replace(OTHER_MODEL, policy=policy_spec(SPEC.hidden))


def play_by_hand(actor: EpisodeActor, num_episodes: int, *, is_perfect: bool = True) -> None:
    """Each step of the game by its rule, or by the policy."""
    game = SignGame()
    for seed in range(num_episodes):
        (observation, _), is_over = game.reset(seed=seed), False
        while not is_over:
            action = actor.act(observation, taken=int(observation[0] > 0) if is_perfect else None)
            observation, reward, _, is_over, _ = game.step(action)
            actor.reward(reward)
        actor.end_episode(observation, truncated=True)


@pytest.mark.parametrize("inference", ["local", "remote"])
def test_perfect_play_by_hand_solves_no_run_and_is_kept(tmp_path: Path, inference: str) -> None:
    with LocalLoop(SPEC, EXPERIENCE, tmp_path / "run", TOKEN, target_return=7.0) as loop:
        with shoal.connect(loop.address, token=TOKEN, inference=inference, behaviour="script") as actor:
            play_by_hand(actor, 110)
            with pytest.raises(ConfigError, match="the behaviour of this actor is script"):
                actor.act(np.zeros(4, np.float32))
        wait_for(lambda: loop.gateway.stats()["demonstrations"]["episodes"] == 110)
        stats = loop.gateway.stats()
        assert stats["solved_s"] is None
        assert (stats["episodes"], stats["steps"], stats["first_segment_at"]) == (0, 0, None)
        assert stats["segments"]["dropped"] == {DropReason.DEMONSTRATION: 110}
        assert stats["segments"]["balanced"]
        assert stats["quarantined"] == {}
        assert math.isnan(stats["mean_return"])
    shown = read_all(tmp_path / "run/demonstrations").values()
    assert len(shown) == 110
    assert {(each.info.behaviour, each.info.episode_return) for each in shown} == {("script", 8.0)}
    assert all(((each.segment.observations[:-1, 0] > 0) == each.segment.actions).all() for each in shown)


@pytest.mark.parametrize("inference", ["local", "remote"])
def test_a_person_takes_the_controls_and_gives_them_back_in_one_episode(tmp_path: Path, inference: str) -> None:
    with serving(tmp_path) as parts, shoal.connect(parts.address, token=TOKEN, inference=inference) as actor:
        for step in range(7):
            held = step in (2, 3, 4)
            assert not held or actor.act([step / 10] * 4, taken=1) == 1
            if not held:
                actor.act([step / 10] * 4)
            actor.reward(float(step))
        actor.end_episode([0.7] * 4)
        wait_for(lambda: parts.ledger.get_totals().received == 3)
        batch = parts.take()
        assert batch.lengths.tolist() == [2, 2]
        assert batch.rewards.tolist() == [0.0, 1.0, 5.0, 6.0]
        assert batch.versions.tolist() == [1] * 4
        np.testing.assert_allclose(batch.log_probabilities, np.log(0.5), rtol=1e-5)
        np.testing.assert_allclose(batch.observations[:, 0], [0.0, 0.1, 0.2, 0.5, 0.6, 0.7], rtol=1e-6)
        assert batch.terminated.tolist() == [False, True]
        stats = parts.gateway.stats()
        assert (stats["steps"], stats["episodes"]) == (4, 0)  # its return is not the policy's
        (shown,) = read_all(tmp_path / "demonstrations").values()
        assert shown.info.behaviour == "human"
        assert shown.segment.actions.tolist() == [1, 1, 1]
        assert shown.segment.rewards.tolist() == [2.0, 3.0, 4.0]
        np.testing.assert_allclose(shown.segment.observations[:, 0], [0.2, 0.3, 0.4, 0.5], rtol=1e-6)
        play_by_hand(actor, 1, is_perfect=False)
        wait_for(lambda: parts.gateway.stats()["episodes"] == 1)


def test_the_script_of_the_page_shows_twenty_episodes(tmp_path: Path) -> None:
    class Game(SignGame):
        is_on = False

        def restart(self) -> np.ndarray:
            self.is_on = True
            return self.reset(seed=1)[0]

        def tick(self, action: int) -> tuple[np.ndarray, float]:
            observation, reward, _, is_over, _ = self.step(action)
            self.is_on = not is_over
            return observation, reward

    block = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    with serving(tmp_path) as parts:
        connect = SimpleNamespace(connect=partial(shoal.connect, token=TOKEN))
        names = {"shoal": connect, "game": Game(), "my_rule": lambda observation: int(observation[0] > 0)}
        exec(compile(block.replace("tcp://127.0.0.1:5555", parts.address), "demonstrations.md", "exec"), names)
        counts = parts.gateway.stats()["demonstrations"]
    assert counts == {"segments": 20, "steps": 160, "episodes": 20}
    assert {each.info.episode_return for each in read_all(tmp_path / "demonstrations").values()} == {8.0}


@pytest.mark.parametrize("inference", ["local", "remote"])
def test_who_leaves_in_the_middle_of_an_episode_has_shown_all_steps(tmp_path: Path, inference: str) -> None:
    with serving(tmp_path) as parts:
        with shoal.connect(parts.address, token=TOKEN, inference=inference) as actor:
            for step in range(4):
                actor.act([step / 10] * 4, taken=step % 2)
        wait_for(lambda: parts.ledger.get_totals().received == 1)
        assert parts.gateway.stats()["actors"][0]["lag"] == 0
    (shown,) = read_all(tmp_path / "demonstrations").values()
    assert shown.segment.actions.tolist() == [0, 1, 0]  # the last has no outcome
