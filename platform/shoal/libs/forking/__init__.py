"""Ray workers that are forked from a process with warm imports."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "forking", extensions={"shoal.worker_starts": {"fork": "shoal.libs.forking.worker_start:make_worker_start"}}
)
