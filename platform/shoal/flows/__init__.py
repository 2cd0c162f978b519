"""Flows: what composes the pillars into something that a user runs. Pillars do not import each other; a flow may."""
