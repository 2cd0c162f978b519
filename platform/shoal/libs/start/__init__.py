"""Files to begin with: `shoal new`, `shoal client`, `shoal where`."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "start",
    verbs={
        "new": ("shoal.libs.start.command:new", "Write files to begin with: a task, an actor, an endpoint, a library."),
        "client": ("shoal.libs.start.packaged:client", "Print the file by which a game in another engine joins a run."),
        "where": (
            "shoal.libs.start.packaged:where",
            "Print where recipes, constraints and clients of engines are.",
        ),
    },
    heading="begin",
)
