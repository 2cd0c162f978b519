"""Registers the games of MinAtar: `--env benchmarks.ours.minatar_games:MinAtar/Breakout-v1`.

Licensed under GPL, so it is the user's to install: only processes that step its games import it.
"""

import minatar.gym  # type: ignore[import-not-found]

minatar.gym.register_envs()
