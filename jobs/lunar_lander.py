"""External actors teach a policy of a simulated lander, which an endpoint already serves: PPO lands it.

    pip install 'CHECKOUT[box2d]'                                     # its physics, wherever an actor or the job runs
    shoal run lunar_lander --actors 4                                 # a cluster, the job and four actors
    ray job submit --working-dir . -- python jobs/lunar_lander.py     # the same on a cluster that is up

`python jobs/lunar_lander.py --help` lists the fields, docs/algorithms.md the algorithms.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check


def spec() -> ActorLearnerSpec:
    """The recipe: a mean return of 200 over 100 episodes, which counts as solved."""
    return ActorLearnerSpec(env="LunarLander-v3", target_return=200.0, max_wall_s=1800.0)


if __name__ == "__main__":
    job_main(spec(), run_actor_learner, job="lunar_lander", check=check)
