"""Models that follow the weights of a run: the version that answers, and the trial of a newer one."""
