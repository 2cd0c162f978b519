"""`shoal doctor`: whether this machine can run Shoal."""
