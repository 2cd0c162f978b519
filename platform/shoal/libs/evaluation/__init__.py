"""Episodes that are played through the endpoint of a run: its trials, its probes, and its evaluation."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "evaluation", extensions={"shoal.evaluators": {"play": "shoal.libs.evaluation.episode_player:EpisodePlayer"}}
)
