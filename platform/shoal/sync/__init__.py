"""How the replicas of a run stay one model. The Trainer asks a `Synchronizer`, and nothing else, of other ranks."""
