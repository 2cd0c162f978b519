"""Train a Task several times, with values from a search space, and register the best network.

    shoal sweep lenet 'optimizer.learning_rate=log(1e-4,1e-1)' --trials 20 stop.steps=500
    shoal run sweep train.task=lenet train.stop.steps=500 'space={optimizer.learning_rate: "log(1e-4,1e-1)"}'

`python jobs/sweep.py --help` lists the fields; docs/sweeps.md explains them.
"""

from shoal.libs.sweep.flow import sweep_main

if __name__ == "__main__":
    sweep_main()
