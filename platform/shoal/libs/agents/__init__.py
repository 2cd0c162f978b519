"""Agents elsewhere: programs that speak to a language model over HTTP, and teach it by their rewards."""

from shoal.plugins.library import Library

LIBRARY = Library("agents")
