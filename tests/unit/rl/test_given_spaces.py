"""Spaces that a run or a game gives as data: their short forms, what is wrong with others, and comparisons."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.actor.environment import make_environment
from shoal.cluster.job_main import ACTORS_INFERENCE
from shoal.errors import ConfigError
from shoal.flows.actor_learner_spec import ActorLearnerSpec, PoliciesSpec
from shoal.flows.rl_policy import check, inspect_environment
from shoal.rl.first_game import describe_given
from shoal.rl.part_specs import GatewaySpec
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire.given_spaces import find_wrong_spaces

ANY = spaces.Box(-np.inf, np.inf, (4,), np.float32)
FRAME = {"shape": [84, 84, 1], "dtype": "uint8", "low": 0, "high": 255}
POLICIES = {"hunters": {"agents": ["left", "right"]}, "prey": {"agents": ["prey"]}}


def make_spec(env: Any, **fields: Any) -> ActorLearnerSpec:
    return ActorLearnerSpec.parse({"env": env, **fields})


@pytest.mark.parametrize(
    ("observation", "action", "space", "actions"),
    [
        ([4], 3, ANY, spaces.Discrete(3)),
        ([4], [3, 2], ANY, spaces.MultiDiscrete([3, 2])),
        ([4], {"shape": [2], "dtype": "int64", "high": 2}, ANY, spaces.MultiDiscrete([3, 3])),
        ([4], {"dtype": "int64", "shape": [], "low": 0.0, "high": 2.0}, ANY, spaces.Discrete(3)),
        (FRAME, 3, spaces.Box(0, 255, (84, 84, 1), np.uint8), spaces.Discrete(3)),
        ({"shape": [84, 84, 1], "dtype": "uint8"}, 3, spaces.Box(0, 255, (84, 84, 1), np.uint8), spaces.Discrete(3)),
        (
            [4],
            [{"low": -1, "high": 1}, 3],
            ANY,
            spaces.Box(np.array([-1, 0], np.float32), np.array([1, 3], np.float32)),
        ),
        (
            {"shape": [2], "low": [-1, -2], "high": 1.5},
            {"shape": [2], "low": -0.1, "high": [1, 2]},
            spaces.Box(np.array([-1, -2], np.float32), np.float32(1.5)),
            spaces.Box(np.float32(-0.1), np.array([1, 2], np.float32)),
        ),
    ],
)
def test_short_forms_are_what_gymnasium_would_say(observation: Any, action: Any, space: Any, actions: Any) -> None:
    algorithm = "sac" if isinstance(actions, spaces.Box) else "ppo"
    spec = make_spec({"observation": observation, "action": action}, algorithm=algorithm)
    experience, first = describe_given(spec)
    assert experience == experience_spec(space, actions, spec)
    assert space.contains(first)
    assert ActorLearnerSpec.from_record(spec.to_record()) == spec
    assert find_wrong_spaces({"observation": observation, "action": action}, experience) == ""


def test_masks_and_a_name_are_given_with_the_spaces() -> None:
    spec = make_spec({"name": "Tic Tac", "observation": [9], "action": 9, "masks": True})
    assert describe_given(spec)[0] == experience_spec(spaces.Box(-np.inf, np.inf, (9,)), spaces.Discrete(9), spec, True)
    assert spec.model_name == "tic-tac"
    assert make_spec({"observation": [9], "action": 9}).model_name == make_spec("ask").model_name == "game"


def test_a_file_is_read_once_and_a_word_of_the_command_line_is_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("catch.yaml").write_text("observation: [4]\naction: 3\n")
    spec = ActorLearnerSpec().override(["env=catch.yaml"])
    Path("catch.yaml").write_text("- observation")
    assert (spec.model_name, json.loads(spec.env)["action"]) == ("catch", 3)
    assert ActorLearnerSpec().override(["env={observation: [4], action: 3}"]).given == {"observation": [4], "action": 3}
    for file, problem in (("catch.yaml", "has no mapping: write `observation"), ("no.yaml", "there is no file /")):
        with pytest.raises(ConfigError, match=problem):
            make_spec(file)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"observation": [4]}, r"action = None: is missing. give 3 for three choices, \[3, 2\]"),
        ({"observation": [4], "action": 3, "mask": True}, "mask = True: no such field. did you mean 'masks'"),
        ({"observation": [4], "action": 3, "masks": "yes"}, "masks = 'yes': is neither true nor false"),
        ({"observation": [4], "action": {"shape": [1], "low": 0, "high": 1}, "masks": True}, "masks = True: are for"),
        ({"observation": 4, "action": 3}, r"observation = 4: is no space .* give \[4\] for four numbers"),
        ({"observation": [4, 0], "action": 3}, r"observation.shape = \[4, 0\]: is no shape"),
        ({"observation": [2**20, 2**20], "action": 3}, "observation.shape = .*: has more than 16,777,216 numbers"),
        (
            {"observation": {"shape": [4], "dtype": "flot32"}, "action": 3},
            "observation.dtype .* did you mean 'float32'",
        ),
        ({"observation": {"shape": [4], "dtype": "bool"}, "action": 3}, "observation.dtype .* give uint8"),
        ({"observation": {"shape": [4], "low": "a"}, "action": 3}, "observation.low = 'a': is no number"),
        ({"observation": {"shape": [4], "low": [1, 2]}, "action": 3}, r"observation.low = \[1, 2\]: is no number"),
        ({"observation": {"shape": [4], "low": float("nan")}, "action": 3}, "observation.low = nan: is not finite"),
        (
            {"observation": {"shape": [4], "low": 1, "high": 1}, "action": 3},
            "observation.low = 1: is not below high = 1",
        ),
        ({"observation": {"shape": [4], "size": 1}, "action": 3}, "observation.size = 1: no such field"),
        ({"observation": [4], "action": 0}, "action = 0: is no number of choices"),
        ({"observation": [4], "action": [3, True]}, "action = .*: is no number of choices"),
        ({"observation": [4], "action": 2**30}, "action = .*: has 1,073,741,824 choices, at most"),
        ({"observation": [4], "action": "left"}, "action = 'left': is no action space"),
        ({"observation": [4], "action": {"shape": [2], "low": -1}}, "action.high = None: is missing: each number"),
        ({"observation": [4], "action": {"dtype": "int64", "low": 1, "high": 3}}, "action.low = 1: is not 0"),
        ({"observation": [4], "action": [{"low": -1}, 2]}, r"action.high = \[None, 2\]: is no number"),
        ({"observation": [4], "action": [{"low": -1, "high": 1}, 2.5]}, "action = .*: is no number of choices"),
        ({"observation": [4], "action": [{"low": -1, "high": 1}, 0]}, "action = .*: is no number of choices"),
        ({"observation": [4], "action": [{"shape": [2], "high": 1}, 2]}, "action.shape = .*: no such field"),
        ({"observation": [4], "action": {"dtype": "int64"}}, "action.high = None: is no choice"),
        ({"observation": [4], "action": 3, "name": 5}, "name = 5: is no name"),
        ({"policies": {"prey": {"observation": [4]}}}, "policies.prey.action = None: is missing"),
        ({"policies": []}, "policies takes the spaces of each policy"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_fit(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        make_spec(given)
    assert caught.value.field == "env"


@pytest.mark.parametrize(
    ("offers", "difference"),
    [
        ({"observation": [3], "action": 3}, "observation.shape: this game has [3], and the run [4]"),
        ({"observation": {"shape": [4], "dtype": "float64"}, "action": 3}, "observation.dtype: this game has float64"),
        ({"observation": {"shape": [4], "low": -2}, "action": 3}, "observation.low: this game has [-2.0], and the"),
        ({"observation": [4], "action": 4}, "action: this game has 4 choices, and the run 3 choices"),
        ({"observation": [4], "action": [3]}, "action: this game has choices of [3], and the run 3 choices"),
        ({"observation": [4], "action": 3, "masks": True}, "masks: this game has True, and the run False"),
        ({"observation": [4]}, "action = None: is missing"),
        (
            {"observation": {"shape": [4], "low": -1, "high": None}, "action": 3},
            "observation.high: this game has [inf]",
        ),
        ({"observation": [4], "action": 3}, ""),
        ({"observation": {"dtype": "float32", "shape": [4], "low": -1, "high": 1}, "action": 3, "name": "x"}, ""),
    ],
)
def test_offers_are_compared_with_the_run_field_by_field(offers: dict[str, Any], difference: str) -> None:
    space = spaces.Box(-1, 1, (4,), np.float32)
    found = find_wrong_spaces(offers, experience_spec(space, spaces.Discrete(3), RLSpec()))
    assert found.startswith(difference)
    assert bool(found) == bool(difference)


_ODD = st.sampled_from([None, True, 2**64 - 1, -1, float("nan"), "1", b"1", [], [[1], 2], {}, {1: 2}, "int64", "uint8"])
_BOX = st.fixed_dictionaries(
    {}, optional={name: _ODD | st.just(3) for name in ("dtype", "low", "high", "size")}
).flatmap(lambda others: st.builds(lambda shape: {**others, "shape": shape}, _ODD | st.just([3]) | st.just([])))


@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries({"observation": _BOX | _ODD, "action": _BOX | _ODD}, optional={"masks": _ODD, "name": _ODD})
)
@example({"observation": {"shape": [4], "low": "1"}, "action": 3})
@example({"observation": b"1", "action": b"1"})
@example({"observation": {"shape": [4], "low": b"1", "dtype": ["float32"]}, "action": 3})
def test_whatever_a_client_offers_is_spaces_or_an_error(offers: dict[str, Any]) -> None:
    experience = experience_spec(ANY, spaces.Discrete(3), RLSpec())
    assert isinstance(find_wrong_spaces(offers, experience), str)
    with suppress(ConfigError):
        describe_given(make_spec(offers))


def test_bounds_of_actions_are_compared_number_by_number() -> None:
    spec = make_spec({"observation": [4], "action": {"shape": [2], "low": [-0.1, 0], "high": [1, 2]}}, algorithm="sac")
    experience, _ = describe_given(spec)
    for action, difference in (
        ({"shape": [2], "low": [-0.1, 0], "high": [1, 2]}, ""),
        ({"shape": [2], "low": [-0.1, 0], "high": 2}, "action.high: this game has [2.0], and the run [1.0, 2.0]"),
        ([{"low": -0.1, "high": 1}, 2], ""),
        ([{"low": -0.1, "high": 1}, 3], "action.high: this game has [1.0, 3.0], and the run [1.0, 2.0]"),
        (3, "action: this game has 3 choices, and the run float32 [2] from -0.1 to 2"),
    ):
        assert find_wrong_spaces({"observation": [4], "action": action}, experience) == difference


def test_what_needs_an_environment_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"observation": [4], "action": 3}
    ((name, (experience, first)),) = check(make_spec(numbers)).items()
    assert (name, experience.action.high, first.tolist()) == ("", 2, [0.0] * 4)
    assert check(make_spec("ask")) == {}
    for env in (numbers, "ask"):
        with pytest.raises(ConfigError, match="eval_episodes = 5: needs an environment to play, and env="):
            check(make_spec(env, eval_episodes=5))
        with pytest.raises(
            ConfigError, match=r"gives spaces, and no environment that could be played here. let a game"
        ):
            make_environment(make_spec(env).env)
        with pytest.raises(ConfigError, match="no environment that could be played here"):
            inspect_environment(make_spec(env))  # of sweeps and populations
    with pytest.raises(ConfigError, match="ignore = 'a': is no part of spaces"):
        check(make_spec(numbers, ignore=["a"]))
    monkeypatch.setenv(ACTORS_INFERENCE, "local")
    with pytest.raises(ConfigError, match=r"--actors.* leave it out, and let games join"):
        check(make_spec(numbers))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"port": 4000}, {"port": 4001}),
        ({"port": 4000, "advertise": "127.0.0.1:30555"}, {"port": 4001, "advertise": "127.0.0.1:30556"}),
        ({"websocket": 9103}, {"websocket": 9104}),
        ({"websocket": 0, "advertise": "localhost"}, {"websocket": 0, "advertise": "localhost"}),
        ({"websocket": 9103, "advertise": "[::1]:30555"}, {"websocket": 9104, "advertise": "[::1]:30556"}),
    ],
)
def test_the_ports_of_a_further_gateway_are_the_next_ones(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert GatewaySpec.parse(fields).shift_ports(1) == GatewaySpec.parse(expected)


def test_several_policies_have_spaces_by_their_names() -> None:
    small, large = ({"observation": [size], "action": 5} for size in (4, 6))
    env = {"name": "tag", "policies": {"hunters": large, "prey": small}}
    spec = PoliciesSpec.parse({"env": env, "policies": POLICIES})
    checked = check(spec)
    assert {name: each.observation.shape for name, (each, _) in checked.items()} == {"hunters": (6,), "prey": (4,)}
    assert checked["hunters"][0].agents == ("left", "right")
    assert spec.split_by_policy()["prey"].model_name == "tag-prey"
    for wrong in ("ask", small, {"policies": {"prey": small}}):
        with pytest.raises(ConfigError, match=r"takes \{policies: \{hunters: \{...\}, prey: \{...\}\}\}"):
            PoliciesSpec.parse({"env": wrong, "policies": POLICIES})
    with pytest.raises(ConfigError, match=r"gives spaces of several policies. use `shoal run policies`"):
        check(make_spec(env))
