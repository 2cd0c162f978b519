"""Serve a policy while it is being learned: every version is live within a quarter of a second of its update.

    shoal run serve_apps/live_policy.py --actors 4                    # learns for ten minutes, and serves meanwhile
    shoal serve deploy serve_apps/live_policy.yaml                    # afterwards: the registered policy

The learner publishes each version to the weight store; two replicas load it from there, each by itself, between two
batches. No request waits for a version, and none is answered by a mixture. At the end, the policy is evaluated and
registered as `cartpole@champion`.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_options import ModelOptions


def spec() -> ActorLearnerSpec:
    """The recipe: CartPole for ten minutes, without a target to stop at, for clients that need an action now."""
    endpoint = EndpointSpec(name="cartpole", num_replicas=2, num_cpus=0.5, model=ModelOptions(deadline_s=0.1))
    return ActorLearnerSpec(env="CartPole-v1", target_return=None, max_wall_s=600.0, endpoint=endpoint)


if __name__ == "__main__":
    job_main(spec(), run_actor_learner, job="actor_learner", check=check)
