"""What people and scripts show: kept beside a run, listed, and learnt from."""
