"""External actors teach a policy that an endpoint already serves; solved, it is registered and played through HTTP.

    shoal run actor_learner --actors 4                                  # a cluster, the job and four actors
    shoal run actor_learner env=CartPole-v1 algorithm.learning_rate=0.002  # any field of the spec
    ray job submit --working-dir . -- python jobs/actor_learner.py      # the same on a cluster that is up

`python jobs/actor_learner.py --help` lists the fields.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check


def spec() -> ActorLearnerSpec:
    """The recipe: CartPole to a mean return of 475 over 100 episodes."""
    return ActorLearnerSpec(env="CartPole-v1", target_return=475.0)


if __name__ == "__main__":
    job_main(spec(), run_actor_learner, job="actor_learner", check=check)
