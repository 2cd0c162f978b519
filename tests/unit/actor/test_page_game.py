"""The game of the page for games in Python is one, and says whether an episode has succeeded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, MultiDiscrete

from shoal.actor import ActorClient
from shoal.actor.agent_streams import find_success
from shoal.actor.environment import check_step, make_environment, reset_environment
from shoal.actor.game import GameActor
from shoal.wire import ExperienceSpec, PolicySpec, TensorSpec
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


class CollectingClient:
    """A connection that keeps what a game sends."""

    actor_id = "a"
    finished = False
    run_id = "run"
    has_credit = True
    behaviour = ""

    def __init__(self, space: Any) -> None:
        flat = gymnasium.spaces.flatten_space(space)
        policy = PolicySpec("mlp_categorical", "tanh", (("policy.0.weight", "policy.0.bias"),))
        observation, action = TensorSpec("float32", flat.shape, 0.0, 1.0), TensorSpec("int64", (), 0, 1)
        self.spec = ExperienceSpec(observation, action, 2, policy, space=describe_space(space))
        self.weights = {
            "policy.0.weight": np.zeros((2, *flat.shape), np.float32),
            "policy.0.bias": np.zeros(2, np.float32),
        }
        self.sent: list[Any] = []
        self.offers: dict[str, Any] = {}

    def wait_for_weights(self, *_: Any) -> tuple[int, dict[str, np.ndarray]]:
        return 1, self.weights

    def received_weights(self, than: int) -> None:
        return None

    newer_weights = received_weights

    def send(self, segment: Any, *_: Any) -> None:
        self.sent.append(segment)

    def close(self, drain_timeout_s: float) -> None:
        return None


@pytest.mark.parametrize("is_flat", [False, True])
def test_a_game_with_its_own_loop_shows_what_it_has(is_flat: bool) -> None:
    space = Dict({"field": Box(0.0, 1.0, (2, 2)), "at": MultiDiscrete([3, 2])})
    shown = {"field": np.array([[0, 1], [1, 0]], np.float32), "at": np.array([2, 0])}
    flat = gymnasium.spaces.flatten(space, shown)
    client = CollectingClient(space)
    with GameActor(cast(ActorClient, client)) as actor:
        for _ in range(2):
            assert actor.act(flat if is_flat else shown) in (0, 1)
            actor.reward(1.0)
        actor.end_episode(flat if is_flat else shown)
    (segment,) = client.sent
    np.testing.assert_array_equal(segment.observations, np.array([flat] * len(segment.observations), np.float32))
