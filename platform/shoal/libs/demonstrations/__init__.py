"""What people and scripts show: kept beside a run, listed, and learnt from."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "demonstrations",
    verbs={
        "demonstrations": (
            "shoal.libs.demonstrations.command:demonstrations",
            "What people and scripts have shown to a RUN: list it, see it, take it along, drop it.",
        ),
        "episodes": (
            "shoal.libs.demonstrations.command:episodes",
            "The episodes that a RUN has recorded: list, see, replay in the game, take along, drop.",
        ),
    },
    extensions={
        "shoal.demonstrations": {
            "check": "shoal.libs.demonstrations.recorder:read_source",
            "prepare": "shoal.libs.demonstrations.recorder:copy_source",
            "recorder": "shoal.libs.demonstrations.recorder:Recorder",
            "learner": "shoal.libs.demonstrations.shown:Shown",
            "episodes": "shoal.libs.demonstrations.episodes:EpisodeCollector",
        }
    },
    heading="play",
)
