"""Searches for a task's best hyper-parameters."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "sweep",
    verbs={
        "sweep": (
            "shoal.libs.sweep.command:sweep",
            "Search for a task's best hyper-parameters: many trials, with a live table.",
        ),
    },
    displays={"sweep": "shoal.libs.sweep.display"},
    extensions={"shoal.panels": {"sweep": "shoal.libs.sweep.report:PANELS"}},
    names={"sweep": "shoal.libs.sweep.api:sweep"},
    heading="train",
)
