"""What runs of the loop play episodes with."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "evaluation", extensions={"shoal.evaluators": {"play": "shoal.libs.evaluation.episode_player:EpisodePlayer"}}
)
