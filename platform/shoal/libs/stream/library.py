"""What the report shows of this library's runs."""

from shoal.plugins.library import Library

LIBRARY = Library("stream", extensions={"shoal.report_panels": {"stream": "shoal.libs.stream.report:PANELS"}})
