"""What is exported, and how: the fields of `shoal export`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.config import Spec
from shoal.serve.spec.model_options import ModelOptions


class ExportSpec(Spec):
    """A model and the folder that it becomes.

    model:       name@version, name@alias, or name for the newest version
    to:          container: an HTTP server; lambda: a function of AWS Lambda
    into:        the folder; empty: NAME-container or NAME-lambda, here
    replace:     replace a folder that is an export of the same model
    examples:    JSON files, each the body of an inference: compared and stored in addition to generated ones
    tolerance:   how far an output may be from the registered model's, relative to its largest value, or to 1
    max_batch_size, batch_dim, finite: as in an endpoint's options
    action:      `best` exports a policy that samples, whose folder takes the best actions; None rejects it
    preprocess, postprocess: `""` leaves a registered hook out, whose code no folder has; None rejects such a model
    """

    model: str = Field(min_length=1)
    to: Literal["container", "lambda"]
    into: str = ""
    replace: bool = False
    examples: list[str] = Field(default_factory=list)
    tolerance: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    max_batch_size: int = Field(default=64, ge=0)
    batch_dim: dict[str, Annotated[int, Field(ge=0)] | None] = Field(default_factory=dict)
    finite: bool = True
    action: Literal["best"] | None = None
    preprocess: Literal[""] | None = None
    postprocess: Literal[""] | None = None

    def make_options(self) -> ModelOptions:
        """The options of an endpoint that answers as the folder does. Raises ConfigError."""
        return ModelOptions(
            max_batch_size=self.max_batch_size,
            max_queue_size=max(self.max_batch_size, 1),
            batch_dim=self.batch_dim,
            finite=self.finite,
            device="cpu",
            warm_up=False,
            preprocess=self.preprocess,
            postprocess=self.postprocess,
        )
