"""Training: a Task defined once, a TrainSpec that configures it, and a Trainer for one process or many."""

from shoal.errors import needs_extra

with needs_extra("cluster"):
    from shoal.train.callback import Callback, TrainingState
    from shoal.train.spec import TrainSpec
    from shoal.train.task import Task

__all__ = ["Callback", "Task", "TrainSpec", "TrainingState"]
