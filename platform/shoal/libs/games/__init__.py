"""Environments for recipes, by gymnasium's ids: `env=shoal.libs.games:Harvest-v0`, `env=shoal.libs.games:Pong-v0`.

Imported by the actors, which step them, and by a run's check. Each is created at its use: Pong alone needs an emulator.
"""

from shoal.errors import needs_extra

with needs_extra("gym"):
    import gymnasium

gymnasium.register("Harvest-v0", "shoal.libs.games.harvest:Harvest")
gymnasium.register("TicTacToe-v0", "shoal.libs.games.tictactoe:TicTacToe")
gymnasium.register("Pong-v0", "shoal.libs.games.pong:make_pong")
gymnasium.register("SmallPong-v0", "shoal.libs.games.pong:make_pong", kwargs={"size": 42})
