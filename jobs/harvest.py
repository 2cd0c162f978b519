"""External actors teach a policy of small frames, which an endpoint already serves: PPO catches apples between stones.

    shoal run harvest --actors 2                                      # a cluster, the job and two actors
    shoal run harvest --actors 2 env=my_games:MinAtar/Breakout-v1 target_return=10  # docs/recipes.md
    ray job submit --working-dir . -- python jobs/harvest.py          # the same on a cluster that is up

`python jobs/harvest.py --help` lists the fields, docs/algorithms.md the algorithms.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check


def spec() -> ActorLearnerSpec:
    """The recipe: 30 apples an episode, in the mean of 100."""
    return ActorLearnerSpec(env="shoal.libs.games:Harvest-v0", target_return=30.0, max_wall_s=1800.0)


if __name__ == "__main__":
    job_main(spec(), run_actor_learner, job="harvest", check=check)
