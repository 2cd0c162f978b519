"""What starts a training run: in this process, or as a worker group of Ray Train."""
