"""`shoal.load` of policies: what a game gives goes in, what its step takes comes out, in NumPy as by the model.

The policies of shoal.libs.off_policy are among them.
"""

import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import shoal
from python_program import run_python
from random_policy import register_random
from shoal.errors import ConfigError
from shoal.loaded.policy import NumPyNetwork, TorchNetwork
from shoal.registry import Registry
from shoal.wire.spaces import describe_space, flatten_rows

PARTS = {"b": spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4)]), "a": spaces.Discrete(3)}
SPACES = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "frame": spaces.Box(0, 255, (12, 12, 1), np.uint8),
    "discrete": spaces.Discrete(5, start=2),
    "nested": spaces.Dict({**PARTS, "c": spaces.Box(-1, 1, (2, 2), np.float32)}),
    "masked": spaces.Dict(
        {"observation": spaces.Box(-1, 1, (2, 3), np.float32), "action_mask": spaces.Box(0, 1, (4,), np.int8)}
    ),
    "choices": spaces.MultiDiscrete([3, 2]),
    "torque": spaces.Box(np.float32([-2, 0]), np.float32([2, 5]), (2,), np.float32),
}


class Game(gymnasium.Env[Any, Any]):
    """Shows and takes the spaces that its id names; its step asserts that it is given what it takes."""

    def __init__(self, shown: str, taken: str) -> None:
        self.observation_space = SPACES[shown]
        self.action_space = SPACES[taken] if taken in SPACES else spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self._show(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), (action, type(action))
        return self._show(), 0.0, False, False, {}

    def _show(self) -> Any:
        shown = self.observation_space.sample()
        if isinstance(shown, dict) and "action_mask" in shown:
            shown["action_mask"] = np.array([0, 1, 0, 1], np.int8)
        return shown


for _shown in SPACES:
    for _taken in ("four", "choices", "torque"):
        gymnasium.register(f"{_shown}-{_taken}-v0", Game, kwargs={"shown": _shown, "taken": _taken})


CASES = [
    ("box-four-v0", "algorithm=impala"),
    ("nested-four-v0", "algorithm=ppo"),
    ("discrete-four-v0", "algorithm=dqn"),
    ("box-four-v0", "algorithm=r2d2"),
    ("box-torque-v0", "algorithm=sac"),
    ("box-torque-v0", "algorithm=ppo", "core=lstm"),
    ("box-choices-v0", "algorithm=ppo", "core=gru"),
    ("frame-choices-v0", "algorithm=impala"),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_policy_acts_as_its_model_does(case: tuple[str, ...]) -> None:
    """For eight steps, of which the fifth begins an episode: a recurrent policy has a state of its own."""
    register_random(*case)
    here = shoal.load("game@champion", seed=1)
    served = shoal.load("game", seed=1)
    served._policy._network = TorchNetwork(served._version, served._opened)
    environment = gymnasium.make(case[0])
    observation, _ = environment.reset(seed=5)
    for step in range(8):
        if step == 5:
            here.reset()
            served.reset()
        action = here.act(observation, deterministic=True)
        np.testing.assert_allclose(action, served.act(observation, deterministic=True), rtol=1e-4, atol=1e-5)
        observation, *_ = environment.step(action)
    assert isinstance(here._policy._network, NumPyNetwork)
    environment.step(here.act(observation, deterministic=False))


@pytest.mark.parametrize("name", SPACES)
def test_observations_become_flat_as_gymnasium_makes_them(name: str) -> None:
    space = SPACES[name]
    described = describe_space(space)
    space.seed(1)
    for _ in range(5):
        drawn = space.sample()
        rows, is_batch = flatten_rows(described, drawn)
        wanted = drawn["observation"] if name == "masked" else drawn
        wanted = wanted if described.kind in ("Box", "Part") else spaces.flatten(space, drawn)
        assert not is_batch
        np.testing.assert_array_equal(rows[0], wanted)


def test_a_batch_of_games_has_a_state_for_each() -> None:
    register_random("nested-four-v0", "algorithm=ppo", "core=gru")
    games = SyncVectorEnv([lambda: gymnasium.make("nested-four-v0") for _ in range(3)])
    together, alone = shoal.load("game"), [shoal.load("game") for _ in range(3)]
    observations, _ = games.reset(seed=1)
    for step in range(6):
        if step == 3:
            together.reset(rows=[True, False, False])
            alone[0].reset()
        actions = together.act(observations, deterministic=True)
        rows = [gymnasium.vector.utils.iterate(games.observation_space, observations)]
        each = [policy.act(one, deterministic=True) for policy, one in zip(alone, rows[0], strict=True)]
        assert actions.tolist() == each
        observations, *_ = games.step(actions)


def test_sampled_actions_follow_the_distribution_and_its_mask() -> None:
    register_random(
        "masked-four-v0", "algorithm=ppo", "model=" + str(Path(__file__).with_name("matrix_net.py")) + ":Net"
    )
    policy = shoal.load("game", seed=0)
    observation = {"observation": np.ones((2, 3), np.float32), "action_mask": np.array([0, 1, 0, 1], np.int8)}
    arrays = {"observation": observation["observation"][None], "action_mask": observation["action_mask"][None] == 1}
    outputs = policy.predict(arrays)
    difference = outputs["logits"][0, 3] - outputs["logits"][0, 1]
    drawn = np.array([policy.act(observation, deterministic=False) for _ in range(2000)])
    assert set(drawn) == {1, 3}
    share = 1 / (1 + math.exp(-difference))
    assert abs((drawn == 3).mean() - share) < 5 * math.sqrt(share * (1 - share) / 2000)  # 5 standard errors
    assert policy.act(observation) == (3 if difference > 0 else 1)


def test_a_policy_that_was_registered_as_sampled_samples() -> None:
    register_random("box-four-v0", "algorithm=ppo")
    version = Registry().get("game")
    factory = version.manifest.model.update({"action": "sampled"})
    files = {name: version.fetch_file(name).read_bytes() for name in version.manifest.files}
    Registry().register("game", version.snapshot(), model=factory, signature=version.manifest.signature, files=files)
    policy = shoal.load("game", seed=0)
    assert len({policy.act(np.zeros(3, np.float32)) for _ in range(200)}) > 1
    assert len({policy.act(np.zeros(3, np.float32), deterministic=True) for _ in range(50)}) == 1


def test_a_mixture_draws_a_member_for_each_episode() -> None:
    register_random("box-four-v0", "algorithm=ppo", members=3)
    policy = shoal.load("game")
    policy.act(np.zeros(3, np.float32))
    (state,) = policy._policy._network._states.values()
    assert state[0] in (1, 2, 3)
    policy.reset()
    assert not policy._policy._network._states


REFUSED = [
    (np.zeros(3), None, "has no part 'observation'"),
    ({"observation": np.zeros((3, 2)), "action_mask": [1] * 4}, None, "give [2, 3] of numbers"),
    ({"observation": np.zeros((2, 3))}, None, 'mask=info["action_mask"]'),
    ({"observation": np.zeros((2, 3))}, [[1] * 4] * 2, "is not [1, 4]"),
]


def test_what_is_not_the_games_is_refused_by_name() -> None:
    register_random(
        "masked-four-v0", "algorithm=ppo", "model=" + str(Path(__file__).with_name("matrix_net.py")) + ":Net"
    )
    policy = shoal.load("game")
    for observation, mask, words in REFUSED:
        with pytest.raises(ConfigError) as raised:
            policy.act(observation, mask=mask)
        assert words in str(raised.value)


def test_a_policy_acts_where_neither_torch_nor_ray_is() -> None:
    register_random("nested-four-v0", "algorithm=ppo")
    program = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ray", "gymnasium"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
import numpy as np, shoal
shown = {"a": 1, "b": (np.array([1, 2]), np.array([0, 1, 1, 0])), "c": np.ones((2, 2))}
print(shoal.load("game@champion").act(shown, deterministic=True))
"""
    answered = run_python(program)
    shown = {"a": 1, "b": (np.array([1, 2]), np.array([0, 1, 1, 0])), "c": np.ones((2, 2))}
    assert int(answered) == shoal.load("game").act(shown, deterministic=True)
