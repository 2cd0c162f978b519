"""The verb of this library, and the report that runs write at their end."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "report",
    verbs={"report": ("shoal.libs.report.page:report", "Write the one-page HTML report of a run.")},
    extensions={"shoal.reports": {"page": "shoal.libs.report.page:write_page"}},
    heading="look",
)
