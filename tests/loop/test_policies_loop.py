"""Several policies in one run: an actor with a connection to the gateway of each, and a learner for each."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal.runs
from rl_setting import TOKEN
from shoal.actor import ActorClient, play
from shoal.actor.policy import make_policy
from shoal.cluster.job_main import ACTORS_INFERENCE
from shoal.errors import ConfigError, SpecMismatch
from shoal.flows.rl_policies.check import check_policies
from shoal.flows.rl_policies.spec import PoliciesSpec
from shoal.libs.games.tag import HUNTERS, PREY, Tag
from shoal.rl.local_loop import LocalLoop
from shoal.weights import decode_tensors
from shoal.wire import ExperienceSpec
from waiting import wait_for

SPEC = PoliciesSpec.parse(
    {
        "env": "shoal.libs.games.tag:Tag",
        "algorithm": {"name": "ppo", "discount": 0.95, "learning_rate": 0.002},
        "segment_length": 32,
        "learner": {"batch_steps": 512},
        "gateway": {"queue_capacity": 32, "max_credits": 4},
        "policies": {"hunters": {"agents": HUNTERS}, "prey": {"agents": [PREY], "hidden": [32]}},
    }
)


def make_loops(spec: PoliciesSpec, folder: Path, opened: ExitStack) -> dict[str, LocalLoop]:
    checked = check_policies(spec)
    return {
        name: opened.enter_context(LocalLoop(spec.make_policy_spec(name), experience, folder / name, TOKEN))
        for name, (experience, _) in checked.items()
    }


def start_actor(loops: Mapping[str, LocalLoop], stop: threading.Event, opened: ExitStack, num_envs: int = 4) -> None:
    def act() -> None:
        with ExitStack() as connected:
            clients = [connected.enter_context(ActorClient(each.address, TOKEN, "a")) for each in loops.values()]
            while not stop.is_set():
                play([Tag() for _ in range(num_envs)], clients, seed=1, max_steps=500)

    thread = threading.Thread(target=act)
    thread.start()
    opened.callback(thread.join)
    opened.callback(stop.set)


def catch_share(
    policies: Mapping[str, tuple[ExperienceSpec, Mapping[str, np.ndarray]]], num_episodes: int = 300
) -> float:
    """The share of episodes in which these weights' hunters catch the prey."""
    acting = {name: make_policy(spec.policy, 0, "judge", spec.action.shape) for name, (spec, _) in policies.items()}
    for name, (_, weights) in policies.items():
        acting[name].load(1, weights)
    caught = 0
    for seed in range(num_episodes):
        game = Tag()
        observations, _ = game.reset(seed=seed)
        while game.agents:
            actions = {
                agent: acting["prey" if agent == PREY else "hunters"].act(each, agent)[0]
                for agent, each in observations.items()
            }
            observations, _, terminations, _, _ = game.step(actions)
        caught += terminations[PREY]
    return caught / num_episodes


def learn(folder: Path, num_steps: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What each policy was given, and the weights that it began and ended with, once each has so many steps."""
    with ExitStack() as opened:
        loops = make_loops(SPEC, folder, opened)
        first = {name: decode_tensors(loop.learner.snapshot().payload) for name, loop in loops.items()}
        specs = {name: loop.gateway.experience for name, loop in loops.items()}
        start_actor(loops, threading.Event(), opened)
        wait_for(lambda: all(loop.gateway.stats()["steps"] > num_steps for loop in loops.values()))
        last = {name: decode_tensors(loop.learner.pause().payload) for name, loop in loops.items()}
        counts = {name: loop.gateway.stats() for name, loop in loops.items()}
        for loop in loops.values():
            loop.learner.resume()
    assert counts["hunters"]["steps"] == pytest.approx(2 * counts["prey"]["steps"], rel=0.1)
    for each in counts.values():
        segments = each["segments"]
        assert set(segments["dropped"]) <= {"stale_admission", "stale_consumption"}
        assert segments["received"] == segments["consumed"] + segments["queued"] + sum(segments["dropped"].values())
    return specs, first, last


def test_two_policies_learn_from_one_actor(tmp_path: Path) -> None:
    """Each gets the experience of its own agents only."""
    specs, first, last = learn(tmp_path, 2_000)
    assert specs["hunters"].observation.shape == (6,)
    assert specs["prey"].observation.shape == (7,)
    for name in specs:
        assert any(not np.array_equal(last[name][key], first[name][key]) for key in first[name])


@pytest.mark.soak
def test_each_of_two_policies_beats_the_weights_that_it_began_with(tmp_path: Path) -> None:
    specs, first, last = learn(tmp_path, 16_000)
    share = {
        (hunters, prey): catch_share(
            {
                "hunters": (specs["hunters"], {"first": first, "last": last}[hunters]["hunters"]),
                "prey": (specs["prey"], {"first": first, "last": last}[prey]["prey"]),
            }
        )
        for hunters in ("first", "last")
        for prey in ("first", "last")
    }
    assert share["last", "first"] > share["first", "first"] + 0.1, share
    assert share["first", "last"] < share["first", "first"] - 0.05, share


@pytest.mark.parametrize(
    ("words", "field", "problem"),
    [
        (["policies.hunters.agents=[left]"], "policies", "gives no policy to right of shoal.libs.games.tag:Tag"),
        (["policies.prey.agents=[prey,fox]"], "policies.prey.agents", "shoal.libs.games.tag:Tag has no such agent"),
        (["policies.hunters.agents=[left,right,prey]"], "PoliciesSpec", "prey has the policy hunters already"),
        (["policies.hunters.agents=[left]", "policies.prey.agents=[right,prey]"], "env", "gives prey other spaces"),
        (["env=CartPole-v1"], "env", "has one agent"),
        (["policies.prey.algorithm=sac"], "env", "sac needs a Box action space"),
        (["algorithm.synchronous=true"], "PoliciesSpec", "actors cannot pause for one of several policies"),
        (["learn_from_endpoint=true"], "PoliciesSpec", "users of an endpoint are one agent"),
        (["self_play.opponents=[tag@1]"], "PoliciesSpec", "policies.NAME.opponents"),
        (["policies.prey.opponents=[tag@1]"], "PoliciesSpec", "hunters would have no opponents"),
        (["gateway.port=65535"], "PoliciesSpec", "65536"),
        (["policies.Prey.agents=[fox]"], "PoliciesSpec", "policies.Prey: a name has lower-case letters"),
        (["target_return=3"], "target_return", "None"),
    ],
)
def test_what_a_run_of_several_policies_cannot_have(words: list[str], field: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as raised:
        check_policies(SPEC.override(words))
    assert raised.value.field == field


def test_a_resumed_run_has_the_policies_that_it_began_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    with shoal.runs.create("tag", SPEC.to_yaml(), kind=shoal.runs.RunKind.LOOP) as recorder:
        pass
    changed = ["max_wall_s=5", "policies.prey.target_return=1", "algorithm.learning_rate=0.1"]
    check_policies(SPEC.override([f"resume={recorder.id}", *changed]))
    with pytest.raises(SpecMismatch, match=r"policies\.prey\.hidden = \[8\]: run .* has learnt with \[32\]"):
        check_policies(SPEC.override([f"resume={recorder.id}", "policies.prey.hidden=[8]"]))


def test_remote_inference_is_refused_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACTORS_INFERENCE, "remote")
    with pytest.raises(ConfigError, match="has several agents"):
        check_policies(SPEC)


def test_each_policy_has_its_own_fields_name_and_port() -> None:
    spec = SPEC.override(["gateway.port=7000", "policies.prey.target_return=1.5", "endpoint.name=yard"])
    hunters, prey = (spec.make_policy_spec(name) for name in ("hunters", "prey"))
    assert (hunters.hidden, prey.hidden) == ((64, 64), (32,))
    assert (hunters.gateway.port, prey.gateway.port) == (7000, 7001)
    assert (hunters.target_return, prey.target_return) == (None, 1.5)
    assert (hunters.model_name, prey.model_name) == ("yard-hunters", "yard-prey")
    assert spec.has_targets
    assert not SPEC.has_targets
