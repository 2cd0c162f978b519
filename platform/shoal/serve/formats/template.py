"""What every format gives the predictor: a template that loads versions, and a forward for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from shoal.weights import WeightSnapshot

Arrays = Mapping[str, np.ndarray]
Forward = Callable[[Arrays], Arrays]  # one whole batch in, the model's outputs by name, in memory of their own


class Template(Protocol):
    """One model without its weights. Immutable to its users: `load` may be called from any thread."""

    def load(self, snapshot: WeightSnapshot) -> Forward:
        """The forward of one version; earlier ones go on as they are. Raises WeightsError when it does not fit."""
        ...
