"""A policy that is served learns from those it serves: two users at an endpoint, and no game client."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest

from refusals import refused
from shoal.errors import ShoalError
from sign_game import SignGame
from waiting import wait_for

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

TOKEN = "a-token-of-the-tests"
STATE_S = 400.0
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning"),  # Serve's own
]


def use(url: str, seed: int, stopping: threading.Event, errors: list[Exception]) -> None:
    """One user: plays the game of signs through the endpoint."""
    from shoal.client import Client

    try:
        game = SignGame()
        with Client(url, token=TOKEN) as client:
            observation, _ = game.reset(seed=seed)
            episode = None
            while not stopping.is_set():
                action, episode = client.act("signs", observation, episode)
                observation, reward, terminated, truncated, _ = game.step(action)
                if terminated or truncated:
                    client.end_episode(episode, observation, reward=reward, truncated=truncated)
                    observation, episode = game.reset()[0], None
                elif reward:
                    client.reward(episode, reward)
    except ShoalError as error:  # the test raises it
        errors.append(error)


@pytest.mark.soak
def test_users_of_an_endpoint_teach_its_policy(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    from pydantic import SecretStr

    from shoal.client import Client
    from shoal.flows.rl_policy import describe_policy_model
    from shoal.rl.gateway.state import GatewaySetting
    from shoal.rl.ray_workers import ActorLearnerWorkers
    from shoal.rl.spec import RLSpec, experience_spec
    from shoal.serve.on_ray.deployment import deploy
    from shoal.serve.spec.endpoint import EndpointSpec
    from shoal.serve.spec.model_source import EndpointModel, LiveModel

    spec = RLSpec(hidden=(16,), learn_from_endpoint=True).override(
        [
            *("learner.batch_steps=64", "learner.max_batch_steps=64", "learner.take_timeout_s=0.1"),
            *("algorithm.learning_rate=0.02", "algorithm.entropy_cost=0.001"),
            *("gateway.heartbeat_s=0.2", "gateway.timeout_s=2", "gateway.episode_timeout_s=3"),
        ]
    )
    space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    experience = experience_spec(space, gymnasium.spaces.Discrete(2), spec)
    with ExitStack() as closing:
        setting = GatewaySetting.of_run(spec, experience, tmp_path, TOKEN, run_id="users", target_return=5.5)
        workers = ActorLearnerWorkers(spec, setting)
        closing.callback(workers.close)
        model = describe_policy_model(spec, experience)
        policy = LiveModel(*model, workers.make_weight_source(), workers.make_episode_service())
        spec = EndpointSpec(name="signs", num_cpus=0.1, token=SecretStr(TOKEN))
        endpoint = deploy(spec, [EndpointModel("signs", policy)])
        closing.callback(endpoint.close)
        workers.wait_for_gateway()

        def count_solved() -> Any:
            gateway, _ = workers.stats()
            assert not errors, errors
            return gateway is not None and gateway["solved_s"] is not None and gateway

        with Client(endpoint.url, token=TOKEN) as client:
            _, never = client.act("signs", [0.0] * 4)
            stopping, errors = threading.Event(), list[Exception]()
            users = [
                threading.Thread(target=use, args=(endpoint.url, seed, stopping, errors), daemon=True)
                for seed in range(2)
            ]
            for user in users:
                user.start()
            stats = wait_for(count_solved, STATE_S, "a policy that users have taught")
            stopping.set()
            for user in users:
                user.join(60)
            assert stats["user_episodes"]["ended"] >= 100
            assert [actor["actor_id"] for actor in stats["actors"]] == ["endpoint-users"]
            wait_for(lambda: workers.stats()[0]["segments"]["dropped"].get("expired"), STATE_S)  # type: ignore[index]
            with refused(410):
                client.reward(never, 1.0)
        final = workers.close_gateway()
        assert final is not None
        assert final["segments"]["balanced"]
