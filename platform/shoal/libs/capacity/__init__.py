"""The latency of replicas under a load, and the replicas that a rate needs: simulations of the batcher."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "capacity",
    verbs={
        "serve simulate": (
            "shoal.libs.capacity.command:simulate_verb",
            "Show the latency of requests at a rate, computed from the model's forward times.",
        ),
    },
    extensions={"shoal.capacity": {"simulated": "shoal.libs.capacity.replica_set:SustainableRates"}},
    heading="serve",
)
