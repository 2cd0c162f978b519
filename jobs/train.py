"""Train any Task: a file of your own, an installed class, or a recipe of this folder.

    shoal run train task=lenet parallel=ddp workers=2
    shoal run train task=my_task.py:MyTask stop.epochs=3
    ray job submit --working-dir . -- python jobs/train.py task=lenet parallel=ddp workers=2

`python -m shoal.train task=lenet` trains in this process, without Ray.
"""

from shoal.flows.training import train_main

if __name__ == "__main__":
    train_main()
