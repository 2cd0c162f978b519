"""Learning from messages as they come, and answering them: sources, the online trainer, group commit."""
