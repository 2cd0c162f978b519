"""Received segments: the queue and its durable ledger."""
