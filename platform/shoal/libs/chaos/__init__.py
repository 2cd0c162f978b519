"""`shoal chaos`: faults on purpose against a run, and whether the promises held."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "chaos",
    verbs={
        "chaos": ("shoal.libs.chaos.command:chaos", "Break a run on purpose, and see whether it keeps its promises."),
    },
)
