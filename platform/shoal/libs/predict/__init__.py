"""`shoal predict`: requests to an endpoint from the shell."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "predict",
    verbs={"predict": ("shoal.libs.predict.command:predict", "Send requests to a model of an endpoint.")},
    heading="serve",
)
