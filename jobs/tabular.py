"""A multilayer perceptron on a table, beside gradient-boosted trees that were fitted to the same rows.

    shoal run tabular                                         # a cluster, the job and a live picture
    shoal run tabular args.hidden='[128, 128]' args.dropout=0.3
    shoal run tabular parallel=ddp workers=2                  # two workers share each batch
    shoal run tabular parallel=fsdp workers=2                 # ... and the parameters
    shoal run tabular parallel=tensor workers=2               # each layer is split
    shoal run tabular parallel=pipeline workers=2             # half of the layers each
    ray job submit --working-dir . -- python jobs/tabular.py  # the same on a cluster that is up
    python -m shoal.train task=tabular                        # in this process, without Ray

The table comes with scikit-learn: 569 tumours, 30 measurements of each, benign or malignant. A quarter is held back and
is what both are judged by: `accuracy` and `accuracy_trees` in the record. On tables trees are hard to beat: look at the
second number before you believe the first, and at several splits (`args.split=1`): a row is 0.7% here.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.errors import needs_extra
from shoal.models.perceptron import Perceptron
from shoal.train import Task, TrainSpec

NUM_FEATURES, NUM_CLASSES = 30, 2


class TumourTask(Task):
    """Whether a tumour is malignant (0) or benign (1).

    split: the seed by which rows are held back
    """

    parts: ClassVar = {
        "standardisation": {"standardise": False},
        "dropout": {"dropout": 0.0},
        "hidden layers": {"hidden": []},
    }

    def __init__(
        self, *, hidden: Sequence[int] = (64, 64), dropout: float = 0.3, standardise: bool = True, split: int = 0
    ) -> None:
        self.hidden, self.dropout, self.standardise, self.split = tuple(hidden), dropout, standardise, split

    def model(self) -> nn.Module:
        return Perceptron(NUM_FEATURES, NUM_CLASSES, self.hidden, self.dropout)

    def data(self) -> Data:
        train, test = tables(self.split, self.standardise)
        return Data(TensorDataset(*train), validation=TensorDataset(*test))

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0],)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        right = outputs.argmax(-1) == batch[1]
        return {"accuracy": right.float().mean(), "accuracy_trees": batch[2].float().mean()}


@cache
def tables(split: int, standardise: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Training and held-back rows: features float32 [N, 30], class int64 [N], whether the trees were right bool [N].

    The trees are fitted once in each process, in a tenth of a second; features are standardised by the training rows.
    """
    with needs_extra("recipes"):
        from sklearn.datasets import load_breast_cancer
        from sklearn.ensemble import HistGradientBoostingClassifier
        from sklearn.model_selection import train_test_split
        from sklearn.preprocessing import StandardScaler

    features, classes = load_breast_cancer(return_X_y=True)
    parts = train_test_split(features, classes, test_size=0.25, random_state=split, stratify=classes)
    train, test, train_classes, test_classes = parts
    trees = HistGradientBoostingClassifier(random_state=0).fit(train, train_classes)
    scaler = StandardScaler().fit(train)
    made = []
    for rows, known in ((train, train_classes), (test, test_classes)):
        right = torch.from_numpy(trees.predict(rows) == known)
        made.append(
            (torch.from_numpy(scaler.transform(rows) if standardise else rows).float(), torch.from_numpy(known), right)
        )
    print(f"gradient-boosted trees: accuracy {made[1][2].float().mean():.4f} on the {len(test)} rows held back")
    return made[0], made[1]


def spec() -> TrainSpec:
    """The recipe: fifteen epochs of AdamW under a cosine; the averaged weights are what is evaluated and kept."""
    return TrainSpec.parse(
        {
            "task": __file__,
            "name": "tumours",
            "batch_size": 32,
            "threads": 1,  # its steps are too small to share
            "optimizer": {"name": "adamw", "learning_rate": 2e-3, "weight_decay": 0.1},
            "schedule": {"name": "cosine"},
            "average": 0.98,
            "stop": {"epochs": 15},
            "evaluate": {"every_epochs": 3},
        }
    )


if __name__ == "__main__":
    from shoal.flows.training import train_main

    train_main(spec())
