"""The name of this library in `shoal`."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "language",
    names={"language": "shoal.libs.language"},
    extensions={"shoal.protocols": {"language": "shoal.libs.language.app:make_app"}},
)
