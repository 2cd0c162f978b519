"""Which plan is fastest for a Task on given hardware: enumerated, predicted, ranked. Called by `shoal plan`."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "planning",
    verbs={
        "plan": ("shoal.libs.planning.plan:plan", "Rank the ways of training a task in parallel on given hardware."),
        "find": ("shoal.libs.planning.find:find", "Find a learning rate, or the largest batch that fits, for a task."),
        "ablate": (
            "shoal.libs.planning.ablate:ablate",
            "Measure what each part of a task adds in accuracy, time and memory.",
        ),
    },
    extensions={"shoal.estimators": {"planning": "shoal.libs.planning.predict.predict:predict_cost"}},
    heading="train",
)
