"""Pipeline parallelism: where the model is split, its stages, and their schedules."""
