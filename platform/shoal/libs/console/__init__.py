"""A console in the browser: runs, models, endpoints and the cluster, seen and operated."""

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
