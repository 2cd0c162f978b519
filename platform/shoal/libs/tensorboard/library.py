"""The mirror of metrics that this library has."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "tensorboard",
    extensions={
        "shoal.metric_mirrors": {"tensorboard": "shoal.libs.tensorboard.event_files:TensorBoardMirror"},
    },
)
