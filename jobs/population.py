"""Thirty LeNets learn Fashion-MNIST at once, in one process, and copy and change each other's hyper-parameters.

    shoal run population                                        # a cluster, the job and a live table of the members
    shoal run population members=8 rounds=5                     # fewer of both
    shoal run population space.optimizer.weight_decay='log(1e-6, 1e-2)'
    shoal run population space.augmentation.erase=null          # one hyper-parameter less
    shoal run population evolution=halving                      # or pbt, the default, random_search
    shoal run population task=my_task.py:MyTask metric=loss     # your own Task
    ray job submit --working-dir . -- python jobs/population.py # the same on a cluster that is up

At the end the best member is registered as `fashion`, and the average of the five best as `fashion-ensemble`:
`shoal serve deploy fashion fashion-ensemble`. The report has the accuracy of each member, the schedule that was found,
and who copied whom. See docs/libs/population.md.
"""

from shoal.libs.population.spec import PopulationSpec


def spec() -> PopulationSpec:
    """The recipe: 30 members of jobs/lenet.py, 20 rounds of 150 steps, in search of rates and augmentations."""
    return PopulationSpec.parse(
        {
            "task": "lenet",
            "name": "fashion",
            "members": 30,
            "rounds": 20,
            "steps_per_round": 150,
            "batch_size": 64,
            "optimizer": {"name": "sgd"},
            "space": {
                "optimizer.learning_rate": "log(1e-3, 2e-1)",
                "optimizer.momentum": "uniform(0.5, 0.97)",
                "augmentation.shift": "uniform(0, 3)",
                "augmentation.flip": "uniform(0, 0.5)",
                "augmentation.erase": "uniform(0, 0.5)",
            },
            "metric": "accuracy",
            "score_samples": 4000,
        }
    )


if __name__ == "__main__":
    from shoal.libs.population.flow.run import population_main

    population_main(spec())
