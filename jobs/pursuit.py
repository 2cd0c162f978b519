"""External actors teach two hunters to corner a prey, by self-play: each learns beside past versions of the policy.

    shoal run pursuit --actors 2                                      # a cluster, the job and two actors
    shoal run pursuit --actors 2 self_play.snapshot_every=0           # both hunters have the newest version, and learn
    ray job submit --working-dir . -- python jobs/pursuit.py          # the same on a cluster that is up

`python jobs/pursuit.py --help` lists the fields, docs/algorithms/several-agents.md explains self-play.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check


def spec() -> ActorLearnerSpec:
    """The recipe: a return of 0.85 in the mean of 100 episodes, which is a catch after four steps."""
    return ActorLearnerSpec.parse(
        {
            "env": "shoal.libs.games.pursuit:Pursuit",
            "algorithm": {"name": "ppo", "discount": 0.95, "learning_rate": 0.002},
            "self_play": {"snapshot_every": 4000},
            "target_return": 0.85,
        }
    )


if __name__ == "__main__":
    job_main(spec(), run_actor_learner, job="pursuit", check=check)
