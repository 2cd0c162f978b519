"""A self-organising map: the network, which is trained by `jobs/som.py`."""
