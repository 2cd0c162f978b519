"""Several policies in one run: an actor with a connection to the gateway of each, and a learner for each."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal.runs
from loop.test_synchronous import assert_no_lag, record_batches
from rl_setting import TOKEN
from shoal.actor import ActorClient, play
from shoal.actor.policy import make_policy
from shoal.cluster.job_main import ACTORS_INFERENCE
from shoal.errors import ConfigError, SpecMismatch
from shoal.flows.actor_learner_spec import PoliciesSpec
from shoal.flows.rl_policy import check
from shoal.libs.games.tag import HUNTERS, PREY, Tag
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.rl.local_loop import LocalLoop
from shoal.weights import decode_tensors
from shoal.wire import ExperienceSpec
from waiting import start_thread, wait_for

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
    checked = check(spec)
    return {
        name: opened.enter_context(LocalLoop(spec.make_policy_spec(name), experience, folder / name, TOKEN))
        for name, (experience, _) in checked.items()
    }


def start_actor(
    loops: Mapping[str, LocalLoop], stop: threading.Event, opened: ExitStack, num_envs: int = 4, actor_id: str = "a"
) -> None:
    def act() -> None:
        with ExitStack() as connected:
            clients = [connected.enter_context(ActorClient(each.address, TOKEN, actor_id)) for each in loops.values()]
            while not stop.is_set():
                play([Tag() for _ in range(num_envs)], clients, seed=1, max_steps=500)

    thread = start_thread(act)
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
    specs, first, last = learn(tmp_path, 1_100)
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
        (["algorithm.synchronous=true", "learn_from_endpoint=true"], "learn_from_endpoint", "ppo pauses actors"),
        (["learn_from_endpoint=true", "self_play.snapshot_every=9"], "learn_from_endpoint", "self-play has several"),
        (["self_play.opponents=[tag@1]"], "PoliciesSpec", "policies.NAME.opponents"),
        (["policies.prey.opponents=[tag@1]"], "PoliciesSpec", "hunters would have no opponents"),
        (["gateway.port=65535"], "PoliciesSpec", "65536"),
        (["policies.Prey.agents=[fox]"], "PoliciesSpec", "policies.Prey: a name has lower-case letters"),
        (["target_return=3"], "target_return", "None"),
    ],
)
def test_what_a_run_of_several_policies_cannot_have(words: list[str], field: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as raised:
        check(SPEC.override(words))
    assert raised.value.field == field


def test_a_resumed_run_has_the_policies_that_it_began_with() -> None:
    with shoal.runs.create("tag", SPEC.to_yaml(), kind=shoal.runs.RunKind.LOOP) as recorder:
        (recorder.folder / "prey" / "checkpoints" / "step-1").mkdir(parents=True)
    changed = ["max_wall_s=5", "policies.prey.target_return=1", "algorithm.learning_rate=0.1"]
    check(SPEC.override([f"resume={recorder.id}", *changed]))
    with pytest.raises(SpecMismatch, match=r"policies\.prey\.hidden = \[8\]: run .* has learnt with \[32\]"):
        check(SPEC.override([f"resume={recorder.id}", "policies.prey.hidden=[8]"]))
    policies = {"wolves": SPEC.policies["hunters"], "prey": SPEC.policies["prey"]}
    with pytest.raises(SpecMismatch, match=r"policies\.wolves\.agents = .*: run .* began with"):
        check(SPEC.model_copy(update={"resume": recorder.id, "policies": policies}))


@pytest.mark.parametrize("prey", ["ppo", pytest.param("dqn", marks=pytest.mark.soak)])
def test_actors_of_several_policies_pause_for_each_that_asks_for_it(prey: str, tmp_path: Path) -> None:
    """Two actors and little credit: each policy's batches are of its newest weights, and none waits for ever."""
    words = ["algorithm.synchronous=true", "learner.batch_steps=128", "segment_length=16", "gateway.max_credits=2"]
    if prey == "dqn":
        words += ["policies.prey.algorithm=dqn"]
    with ExitStack() as opened:
        loops = make_loops(SPEC.override(words), tmp_path, opened)
        batches = {name: record_batches(loop) for name, loop in loops.items()}
        stop = threading.Event()
        for actor_id in ("a", "b"):
            start_actor(loops, stop, opened, num_envs=3, actor_id=actor_id)
        wait_for(lambda: all(loop.learner.version > 8 for loop in loops.values()))
        stop.set()
    assert_no_lag(batches["hunters"])
    if prey == "ppo":
        assert_no_lag(batches["prey"])
    for loop in loops.values():
        totals = loop.ledger.get_totals()
        assert totals.is_balanced
        assert totals.dropped.get("stale_consumption", 0) == 0
        assert totals.consumed > 8


def test_users_of_the_endpoint_teach_the_policy_whose_model_they_ask(tmp_path: Path) -> None:
    spec = SPEC.override(["learn_from_endpoint=true", "learner.batch_steps=4", "learner.take_timeout_s=0.1"])
    with ExitStack() as opened:
        gateways = {name: loop.gateway for name, loop in make_loops(spec, tmp_path, opened).items()}

        def ask(**fields: Any) -> EpisodeAnswer:
            answer = gateways["prey"].answer_user(EpisodeRequest("tag-prey", **fields), 20.0)
            assert isinstance(answer, EpisodeAnswer), answer
            return answer

        episode = ask(observation=[0.0] * 7).episode
        for _ in range(4):
            assert ask(episode=episode, observation=[0.5] * 7, reward=1.0).action in range(5)
        ask(episode=episode, reward=1.0, ended=True)
        wait_for(lambda: gateways["prey"].stats()["segments"]["consumed"] == 1)
        assert gateways["prey"].stats()["mean_return"] == 5.0
        assert gateways["hunters"].stats()["segments"]["received"] == 0


def test_two_policies_learn_with_inference_at_their_gateways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ready actor, which has an episode for each agent at the gateway of its policy."""
    monkeypatch.setenv(ACTORS_INFERENCE, "remote")
    with ExitStack() as opened:
        loops = make_loops(SPEC.override(["learner.batch_steps=128"]), tmp_path, opened)
        words = ["--connect", ",".join(loop.address for loop in loops.values()), "--env", SPEC.env]
        actor = subprocess.Popen(
            [sys.executable, "-m", "shoal.actor", *words, "--inference", "remote", "--seed", "1"],
            env={**os.environ, "SHOAL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
        )
        opened.callback(lambda: actor.wait(30))
        opened.callback(actor.terminate)
        wait_for(lambda: all(loop.learner.updates > 1 and loop.gateway.stats()["episodes"] for loop in loops.values()))
        counts = {name: loop.gateway.stats() for name, loop in loops.items()}
    assert counts["hunters"]["steps"] == pytest.approx(2 * counts["prey"]["steps"], abs=2 * 64)
    assert counts["prey"]["remote_inference"]["actions"] >= counts["prey"]["steps"]


def test_remote_inference_with_self_play_is_refused_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACTORS_INFERENCE, "remote")
    with pytest.raises(ConfigError, match="draws no opponents"):
        check(SPEC.override(["self_play.snapshot_every=9"]))


def test_each_policy_has_its_own_fields_name_and_port() -> None:
    spec = SPEC.override(["gateway.port=7000", "policies.prey.target_return=1.5", "endpoint.name=yard"])
    hunters, prey = (spec.make_policy_spec(name) for name in ("hunters", "prey"))
    assert (hunters.hidden, prey.hidden) == ((64, 64), (32,))
    assert (hunters.gateway.port, prey.gateway.port) == (7000, 7001)
    assert (hunters.target_return, prey.target_return) == (None, 1.5)
    assert (hunters.model_name, prey.model_name) == ("yard-hunters", "yard-prey")
