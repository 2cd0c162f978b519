"""Learning from experience of any age: DQN, R2D2 and SAC, each with a replay."""
