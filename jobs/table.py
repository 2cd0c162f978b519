"""A table as it is, CSV or Parquet, becomes a model whose requests are rows as they are.

    shoal run table data=customers.csv target=churned                   # on a cluster; registers `customers`
    shoal run table data=houses.parquet target=price columns.zip=word   # a kind that is not as inferred
    shoal run table data=visits.csv target=stays order_by=day           # the last fifth by day is for validation
    shoal run table data=customers.csv target=churned name=churn network.width=256
    ray job submit --working-dir . -- python jobs/table.py data=customers.csv target=churned
    python -m shoal.train task=table data=customers.csv target=churned  # in this process, without Ray

Numbers, words, dates, truths and gaps become inputs by encoders that are fitted to the training rows and registered
with the network. The run ends when twelve evaluations bring nothing, and retains the best weights. `accuracy_trees` (or
`r2_trees`) in its record is what gradient-boosted trees reach on the same rows: look at it before you believe the
network's own number. See docs/tutorials/table.md.
"""

from shoal.libs.tabular.task import TableTask
from shoal.train import TrainSpec


class TablePrediction(TableTask):
    """Predicts a column of a table from the others. Its arguments are those of `TableTask`."""


def spec() -> TrainSpec:
    """The recipe: AdamW at a constant rate, until the validation loss improves no more."""
    return TrainSpec.parse(
        {
            "task": __file__,
            "name": "{data}",
            "batch_size": 256,
            "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 3e-4},
            "clip_norm": 1.0,
            "average": 0.98,
            "stop": {"epochs": 100, "convergence": {"metric": "loss", "patience": 12}},
            "evaluate": {"batch_size": 1024},
        }
    )


if __name__ == "__main__":
    from shoal.flows.training import train_main

    train_main(spec())
