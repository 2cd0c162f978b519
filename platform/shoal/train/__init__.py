"""Training: a Task written once, a TrainSpec that says how, and a Trainer that runs it in one process or in many."""

from shoal.train.spec import TrainSpec
from shoal.train.task import Task

__all__ = ["Task", "TrainSpec"]
