"""Models that follow the weights of a run: which version answers, and the trial of a newer one."""
