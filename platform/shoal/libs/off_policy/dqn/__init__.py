"""DQN with the parts that last: n-step double targets, dueling, prioritised replay, an ε of each actor (1803.00933)."""
