"""External actors teach a policy of continuous actions, which an endpoint already serves: SAC swings a pendulum up.

    shoal run pendulum --actors 2                                     # a cluster, the job and two actors
    shoal run pendulum --actors 2 env=MountainCarContinuous-v0 target_return=90
    ray job submit --working-dir . -- python jobs/pendulum.py         # the same on a cluster that is up

`python jobs/pendulum.py --help` lists the fields, docs/algorithms.md the algorithms.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check


def spec() -> ActorLearnerSpec:
    """The recipe: a mean return of -200 over 100 episodes."""
    return ActorLearnerSpec.parse({"env": "Pendulum-v1", "algorithm": "sac", "target_return": -200.0})


if __name__ == "__main__":
    job_main(spec(), run_actor_learner, job="pendulum", check=check)
