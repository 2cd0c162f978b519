"""External actors teach a policy of pixels, which an endpoint already serves: DQN plays Pong of the Atari 2600.

    pip install ale-py opencv-python-headless                         # the emulator, licensed under GPL
    shoal run pong --actors 2 --envs 4                                # frames of 42 x 42: a learner without a GPU
    shoal run pong --actors 16 env=shoal.libs.games:Pong-v0 target_return=18   # of 84 x 84, for one with a GPU
    ray job submit --working-dir . -- python jobs/pong.py             # the same on a cluster that is up

`python jobs/pong.py --help` lists the fields, docs/algorithms.md the algorithms.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check


def spec() -> ActorLearnerSpec:
    """The recipe: a mean return of -15 over 100 episodes: six points against 21."""
    return ActorLearnerSpec.parse(
        {
            "env": "shoal.libs.games:SmallPong-v0",
            "algorithm": {
                "name": "dqn",
                "learning_rate": 0.0003,
                "num_steps": 5,
                "batch_size": 64,
                "samples_per_insert": 6,
                "learning_starts": 4000,
                "epsilon_steps": 40_000,
                "target_update_period": 500,
                "replay_mb": 1500,
            },
            "target_return": -15.0,
            "max_wall_s": 7200.0,
        }
    )


if __name__ == "__main__":
    job_main(spec(), run_actor_learner, job="pong", check=check)
