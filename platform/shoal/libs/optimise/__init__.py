"""Smaller versions of a registered model, by distillation, precision and export. Called by `shoal optimise`."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "optimise",
    verbs={
        "optimise": (
            "shoal.libs.optimise.command:optimise",
            "Try smaller versions of a model, measure each, and register the fastest that is as good.",
        ),
    },
    heading="serve",
)
