"""The verb of this library."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "console",
    verbs={"console": ("shoal.libs.console.command:console", "Show runs, models and endpoints in the browser.")},
    heading="look",
)
