"""The verb of this library."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "export",
    verbs={
        "export": (
            "shoal.libs.export.command:export",
            "Write a registered model as a folder that serves itself: a container or a Lambda function.",
        ),
    },
)
