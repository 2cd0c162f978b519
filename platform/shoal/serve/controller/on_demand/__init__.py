"""Models that a replica loads when they are asked for: which replica has which, within its memory."""
