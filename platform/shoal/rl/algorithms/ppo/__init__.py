"""PPO (1707.06347), with the decoupled objective for experience of older weights (2110.00641)."""
