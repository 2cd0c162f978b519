"""The verbs of this library, and the report that runs write at their end."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "console",
    verbs={
        "console": ("shoal.libs.console.job:console", "Show runs, models and endpoints in the browser."),
        "report": ("shoal.libs.console.report:report", "Write the one-page HTML report of a run."),
    },
    extensions={"shoal.reports": {"page": "shoal.libs.console.report:write_page"}},
    heading="look",
)
