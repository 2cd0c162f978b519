"""Flows compose the pillars into runs that a user starts. Pillars do not import each other; a flow may."""
