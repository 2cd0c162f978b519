"""The words of `track=` that this library has."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "tracking",
    extensions={
        "shoal.trackers": {
            "mlflow": "shoal.libs.tracking.trackers:MlflowTracker",
            "wandb": "shoal.libs.tracking.trackers:WandbTracker",
            "trackio": "shoal.libs.tracking.trackers:TrackioTracker",
        }
    },
)
