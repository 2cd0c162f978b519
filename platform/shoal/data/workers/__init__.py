"""Loader processes, and how batches are transferred from them."""
