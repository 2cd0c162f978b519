"""Ray workers that are forked from a process with warm imports."""
