"""The game of the page for games in Python is one, and says whether an episode has succeeded."""

import re
from pathlib import Path
from typing import cast

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, MultiDiscrete

from rl_setting import POLICY, RecordingClient, weights
from shoal.actor import ActorClient
from shoal.actor.agent_streams import find_success
from shoal.actor.environment import check_step, make_environment, reset_environment
from shoal.actor.game import GameActor
from shoal.wire import ExperienceSpec, TensorSpec
from shoal.wire.spaces import describe_space

PAGE = Path(__file__).parents[3] / "docs" / "games" / "python.md"


def test_it_can_be_played_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"^```python file=grid.py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "grid_of_page.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    game = make_environment("grid_of_page:Grid-v0")
    del gymnasium.registry["Grid-v0"]  # another test registers it, too
    _, info = reset_environment(game, "Grid-v0")
    check_step(game, "Grid-v0", info)
    game.reset(seed=1)
    steps = [game.step(0) for _ in range(30)]
    assert {find_success(info) for *_, info in steps} == {False}
    assert [truncated for _, _, _, truncated, _ in steps] == [False] * 29 + [True]


@pytest.mark.parametrize("is_flat", [False, True])
def test_a_game_with_its_own_loop_shows_what_it_has(is_flat: bool) -> None:
    space = Dict({"field": Box(0.0, 1.0, (2, 2)), "at": MultiDiscrete([3, 2])})
    shown = {"field": np.array([[0, 1], [1, 0]], np.float32), "at": np.array([2, 0])}
    flat = gymnasium.spaces.flatten(space, shown)
    observation, action = TensorSpec("float32", flat.shape, 0.0, 1.0), TensorSpec("int64", (), 0, 1)
    client = RecordingClient(
        ExperienceSpec(observation, action, 2, POLICY, space=describe_space(space)), weights(1, flat.size).tensors()
    )
    with GameActor(cast(ActorClient, client)) as actor:
        for _ in range(2):
            assert actor.act(flat if is_flat else shown) in (0, 1)
            actor.reward(1.0)
        actor.end_episode(flat if is_flat else shown)
    (segment,) = client.segments
    np.testing.assert_array_equal(segment.observations, np.array([flat] * len(segment.observations), np.float32))
