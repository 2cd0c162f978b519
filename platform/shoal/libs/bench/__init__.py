"""`shoal bench`: load from simulated callers and actors, and what an endpoint or a gateway makes of it."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "bench",
    verbs={
        "bench": ("shoal.libs.bench.command:bench", "Put a load on an endpoint or a gateway, and measure it."),
    },
    needs=("predict",),
)
