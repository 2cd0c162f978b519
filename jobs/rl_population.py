"""Four learners of CartPole, each fed by external actors, copy each other and change their hyper-parameters in place.

    shoal run rl_population members=4                              # a cluster, the job and a live table of the members
    shoal run rl_population env=Acrobot-v1 algorithm=ppo rounds=20
    shoal run rl_population space.algorithm.clip='uniform(0.1, 0.3)' algorithm=ppo
    shoal run rl_population evolution=random_search                # no member copies another

At the end the policy of the best member is registered, and the report has the schedule of hyper-parameters that was
found, and who copied whom. `python jobs/rl_population.py --help` lists the fields; see docs/libs/population.md.
"""

from shoal.libs.population.loop.spec import RLPopulationSpec


def spec() -> RLPopulationSpec:
    """The recipe: 4 learners with an actor each, 10 rounds of 10,000 environment steps a member."""
    return RLPopulationSpec.parse(
        {
            "env": "CartPole-v1",
            "members": 4,
            "rounds": 10,
            "steps_per_round": 10_000,
            "learner": {"batch_steps": 512, "max_batch_steps": 2048},
            "space": {
                "algorithm.learning_rate": "log(1e-4, 1e-2)",
                "algorithm.entropy_cost": "log(1e-4, 3e-2)",
            },
            "model_name": "cartpole",
        }
    )


if __name__ == "__main__":
    from shoal.libs.population.loop.run import rl_population_main

    rl_population_main(spec())
