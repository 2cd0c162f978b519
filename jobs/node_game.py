"""An actor in JavaScript teaches a policy, which an endpoint already serves: the game of clients/node catches apples.

    npm ci --prefix clients/node                                      # once
    cd clients/node/games                                             # the run checks the game's spaces by catch.py
    shoal run node_game --actors 1                                    # one actor in Python; prints the address
    node ../actor.js --connect ADDRESS                                # in another terminal: one in JavaScript

`python jobs/node_game.py --help` lists the fields, docs/protocol.md says how a client in any language is written.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check


def spec() -> ActorLearnerSpec:
    """The recipe: four of five apples more than missed, in the mean of 100 episodes."""
    return ActorLearnerSpec.parse(
        {
            "env": "catch:Catch-v0",
            "algorithm": {"name": "impala", "learning_rate": 0.01, "discount": 0.9},
            "hidden": [16],
            "segment_length": 64,
            "target_return": 4.0,
        }
    )


if __name__ == "__main__":
    job_main(spec(), run_actor_learner, job="node_game", check=check)
