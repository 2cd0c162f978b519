"""External actors teach a policy a board game with action masks, which an endpoint already serves: DQN and tic-tac-toe.

    shoal run tictactoe --actors 2                                    # a cluster, the job and two actors
    shoal run tictactoe --actors 2 algorithm=ppo                      # or impala
    ray job submit --working-dir . -- python jobs/tictactoe.py        # the same on a cluster that is up

`python jobs/tictactoe.py --help` lists the fields, docs/algorithms.md the algorithms.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check


def spec() -> ActorLearnerSpec:
    """The recipe: against a random opponent, 0.85 of a win in the mean of 100 games, of which chance begins half."""
    return ActorLearnerSpec.parse(
        {
            "env": "shoal.libs.games:TicTacToe-v0",
            "algorithm": {"name": "dqn", "discount": 1.0, "num_steps": 1, "epsilon": 0.02},
            "eval_episodes": 200,
            "target_return": 0.85,
        }
    )


if __name__ == "__main__":
    job_main(spec(), run_actor_learner, job="tictactoe", check=check)
