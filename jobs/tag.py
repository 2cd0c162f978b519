"""External actors teach two hunters and their prey at once: a policy for the hunters, and another for the prey.

    shoal run tag --actors 2                                       # a cluster, the job and two actors
    shoal run tag --actors 2 policies.prey.algorithm=dqn           # another algorithm for one of them
    shoal run tag --actors 2 self_play.snapshot_every=4000         # one agent learns, against past versions
    shoal run tag max_wall_s=60 endpoint.name=my-tag               # registers my-tag-hunters and my-tag-prey
    ray job submit --working-dir . -- python jobs/tag.py           # the same on a cluster that is up

Each policy has its own gateway, learner and endpoint model; an actor connects to all gateways, by the addresses that
the job prints. `python jobs/tag.py --help` lists the fields, docs/algorithms/several-policies.md explains them.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import PoliciesSpec
from shoal.flows.rl_policy import check


def spec() -> PoliciesSpec:
    """The recipe: both learn for two minutes, and then play through the endpoint."""
    return PoliciesSpec.parse(
        {
            "env": "shoal.libs.games.tag:Tag",
            "algorithm": {"name": "ppo", "discount": 0.95, "learning_rate": 0.002},
            "max_wall_s": 120,
            "policies": {"hunters": {"agents": ["left", "right"]}, "prey": {"agents": ["prey"]}},
        }
    )


if __name__ == "__main__":
    job_main(spec(), run_actor_learner, job="tag", check=check)
