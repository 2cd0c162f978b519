"""Trackers of runs: MLflow, Weights & Biases, Trackio."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "tracking",
    verbs={
        "runs track": (
            "shoal.libs.tracking.follower:track",
            "Send a RUN (the newest when left out) to a tracker: all of it, or what the tracker lacks.",
        ),
    },
    extensions={
        "shoal.followers": {"processes": "shoal.libs.tracking.processes:Followers"},
        "shoal.metric_mirrors": {"tensorboard": "shoal.libs.tracking.event_files:TensorBoardMirror"},
        "shoal.trackers": {
            "mlflow": "shoal.libs.tracking.trackers:MlflowTracker",
            "wandb": "shoal.libs.tracking.trackers:WandbTracker",
            "trackio": "shoal.libs.tracking.trackers:TrackioTracker",
        },
    },
)
