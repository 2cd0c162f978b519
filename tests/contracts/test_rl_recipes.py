"""Each recipe of a game has a spec that fits its environment, as the job's check would find."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from shoal.actor.environment import get_spaces, make_environment
from shoal.flows.rl_policy import check
from shoal.rl.spec import experience_spec

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("actor_learner", None),
        ("pendulum", None),
        ("acrobot", None),
        ("harvest", None),
        ("tictactoe", None),
        ("pursuit", None),
        ("lunar_lander", (Box(-1, 1, (8,)), Discrete(4))),
        ("pong", (Box(0, 255, (4, 42, 42), np.uint8), Discrete(6))),
        ("game", (Box(-1, 1, (4,)), Discrete(3))),
    ],
)
def test_a_recipe_can_learn_its_environment(name: str, environment: tuple[Box, Discrete] | None) -> None:
    """Spaces are given where creating the environment needs more than the tests have."""
    spec = runpy.run_path(str(JOBS / f"{name}.py"))["spec"]()
    if environment is None:
        made = make_environment(spec.env)
        environment = get_spaces(made, spec.env)
    assert experience_spec(*environment, spec).observation.shape == environment[0].shape
    assert spec.target_return is not None
    assert spec.gateway.queue_capacity >= 4 * spec.gateway.max_credits  # the actors that its commands name


def test_the_recipe_of_several_policies_gives_each_agent_one() -> None:
    spec = runpy.run_path(str(JOBS / "tag.py"))["spec"]()
    checked = check(spec)
    assert {name: each.agents for name, (each, _) in checked.items()} == {
        "hunters": ("left", "right"),
        "prey": ("prey",),
    }
