"""External actors teach a policy of classic control, which an endpoint already serves: PPO swings the acrobot up.

    shoal run acrobot --actors 4                                      # a cluster, the job and four actors
    shoal run acrobot --actors 4 env=MountainCar-v0 target_return=-110
    ray job submit --working-dir . -- python jobs/acrobot.py          # the same on a cluster that is up

`python jobs/acrobot.py --help` lists the fields, docs/algorithms.md the algorithms.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check


def spec() -> ActorLearnerSpec:
    """The recipe: a mean return of -86 over 100 episodes."""
    return ActorLearnerSpec(env="Acrobot-v1", target_return=-86.0)


if __name__ == "__main__":
    job_main(spec(), run_actor_learner, job="acrobot", check=check)
