"""Files to begin with: `shoal new`."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "start",
    verbs={
        "new": ("shoal.libs.start.command:new", "Write files to begin with: a task, an actor, an endpoint, a library.")
    },
    heading="begin",
)
