"""Each recipe of a game has a spec that fits its environment, as the job's check would find."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from shoal.actor.environment import get_spaces, make_environment
from shoal.errors import ConfigError
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
    assert spec.queue_capacity >= 4 * spec.gateway.max_credits  # the actors that its commands name


def test_the_recipe_of_several_policies_gives_each_agent_one() -> None:
    spec = runpy.run_path(str(JOBS / "tag.py"))["spec"]()
    checked = check(spec)
    assert {name: each.agents for name, (each, _) in checked.items()} == {
        "hunters": ("left", "right"),
        "prey": ("prey",),
    }


@pytest.mark.parametrize(
    ("words", "agents"),
    [
        ("", {"left": ("left",), "right": ("right",), "prey": ("prey",)}),
        (
            "policies.pack.agents=[left,right] policies.prey.agents=[prey]",
            {"pack": ("left", "right"), "prey": ("prey",)},
        ),
        ("env=zoo.yaml policies.cat.algorithm=dqn", {"cat": ("cat",), "mouse": ("mouse",)}),
        ("env=zoo.yaml policies.cat.agents=[tom,kit]", {"cat": ("tom", "kit"), "mouse": ("mouse",)}),
        ("env=CartPole-v1", "has one agent. use `shoal run actor_learner`"),
        ("env=ask", "gives no spaces of several policies"),
        ("env=cat.yaml", "gives no spaces of several policies"),
    ],
)
def test_a_game_of_several_policies_needs_no_job_of_its_own(
    words: str, agents: dict[str, tuple[str, ...]] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cat = "{observation: [4], action: 3}"
    Path("zoo.yaml").write_text(f"policies: {{cat: {cat}, mouse: {{observation: [2], action: 2}}}}")
    Path("cat.yaml").write_text(cat)
    make = runpy.run_path(str(JOBS / "policies.py"))["spec"]
    if isinstance(agents, str):
        with pytest.raises(ConfigError, match=agents):
            make(words.split())
        return
    spec = make(words.split()).override(words.split())
    assert {name: each.agents for name, (each, _) in check(spec).items()} == agents
    assert spec.model_name == ("zoo" if "zoo" in words else "tag")
    assert {each.algorithm.name for each in spec.split_by_policy().values()} == {"ppo"} | (
        {"dqn"} if "dqn" in words else set()
    )
