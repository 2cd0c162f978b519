"""Every row of a file or folder gets a registered model's outputs: `shoal batch-predict`."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "batch_predict",
    verbs={
        "batch-predict": (
            "shoal.libs.batch_predict.command:batch_predict",
            "Predict every row of a file or folder with a registered model.",
        ),
    },
    heading="serve",
)
