"""Play CartPole with an endpoint's policy, episode after episode, and watch it improve.

python serve_apps/live_policy_client.py [EPISODES]
"""

import sys

import gymnasium
import numpy as np

from shoal.client import Client
from shoal.client.discovery import find_endpoint, token_for
from shoal.errors import ConnectionLost, InferenceError


def play(client: Client, environment: gymnasium.Env[np.ndarray, int], seed: int) -> tuple[float, set[int]]:
    """The return of one episode, and the versions of the weights that chose its actions."""
    observation, _ = environment.reset(seed=seed)
    total, versions, is_over = 0.0, set(), False
    while not is_over:
        answer = client.infer(
            "cartpole", observation[None], outputs=["action"], deadline_s=10.0
        )  # the pole does not fall meanwhile
        versions.add(answer.version)
        observation, reward, terminated, truncated, _ = environment.step(int(answer["action"][0]))
        total, is_over = total + float(reward), terminated or truncated
    return total, versions


def main() -> None:
    found = find_endpoint()
    environment = gymnasium.make("CartPole-v1")
    # A replaced replica loses its requests; a retry is safe.
    with Client(found.url, token=token_for(found.url), retry_lost=True) as client:
        for episode in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20):
            try:
                total, versions = play(client, environment, seed=episode)
            except (ConnectionLost, InferenceError) as error:
                print(f"the endpoint has ended, or refuses: {error}")
                break
            print(f"episode {episode}: return {total:.0f}, played by versions {min(versions)} to {max(versions)}")
    environment.close()


if __name__ == "__main__":
    main()
