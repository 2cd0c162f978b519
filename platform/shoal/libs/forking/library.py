"""How this library starts the workers of an embedded cluster."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "forking", extensions={"shoal.worker_starts": {"fork": "shoal.libs.forking.worker_start:make_worker_start"}}
)
