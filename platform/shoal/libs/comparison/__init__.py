"""What runs cost, side by side: the predicted and the measured cost of one, and the results and costs of several."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "comparison",
    verbs={
        "inspect": (
            "shoal.libs.comparison.inspect:inspect",
            "Predict what a task costs; after a run, compare with the measurements.",
        ),
        "compare": ("shoal.libs.comparison.compare:compare", "Put runs side by side, in a table and a picture."),
    },
    heading="look",
)
