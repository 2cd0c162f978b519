"""What the report shows of this library's runs."""

from shoal.plugins.library import Library

LIBRARY = Library("sweep", extensions={"shoal.report_panels": {"sweep": "shoal.libs.sweep.report:PANELS"}})
