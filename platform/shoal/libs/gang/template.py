"""The format of models that several workers share: a template whose versions lie on all of them.

Called by the predictor, as any format's. Cuts a batch into micro-batches, so that every stage of a pipeline works.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from shoal.errors import ConfigError
from shoal.libs.gang.gang import Gang
from shoal.libs.gang.messages import LoadVersion
from shoal.libs.gang.plan import find_plan
from shoal.serve.model.formats.template import Arrays, Forward, TemplateConfig
from shoal.serve.model.hooks import find_hook
from shoal.serve.model.warm_up import make_example
from shoal.serve.spec.batch_layout import BatchLayout
from shoal.weights import WeightFile, WeightSnapshot

MICRO_BATCHES_PER_STAGE = 2  # as in training; smaller ones cost more than the bubble, since batches follow each other
NUM_EXAMPLES = 2


class GangTemplate:
    """A model on the workers of `gang`. Raises ConfigError for what they do not share, PlanError for a model that
    cannot be split."""

    def __init__(self, config: TemplateConfig, gang: Gang) -> None:
        options, factory = config.options, config.factory
        _require(factory.format == "module", "format", factory.format)
        _require(config.device == "cpu", "device", config.device)
        _require(options.precision == "fp32", "precision", options.precision)
        _require(not options.compile, "compile", True)
        self._config, self._gang = config, gang
        layout = BatchLayout(config.signature, options)
        example = layout.to_model_shapes(make_example(layout.signature, min(NUM_EXAMPLES, options.max_batch_size or 1)))
        hook = find_hook("preprocess", factory, options)
        inputs: Arrays = example if hook is None else hook(example)
        self._plan = find_plan(factory, inputs, gang.split, gang.num_workers, config.bf16_inputs)
        has_rows = options.max_batch_size > 0 and None not in layout.dimensions.values()
        self._can_split = has_rows and not (config.has_preprocess or config.has_postprocess)
        self._dimensions = {name: dimension or 0 for name, dimension in layout.dimensions.items()}

    def load(self, snapshot: WeightSnapshot) -> Forward:
        assert isinstance(snapshot, WeightFile), "the loader of a gang hands on files"
        key = self._gang.load(lambda key: LoadVersion(key, self._config, self._plan, snapshot))
        forward = _GangForward(self._gang, key, self._dimensions if self._can_split else None)
        weakref.finalize(forward, self._gang.drop, key)
        return forward


class _GangForward:
    """One version's forward.

    dimensions: of the batch, by tensor; None where a batch cannot be cut
    """

    def __init__(self, gang: Gang, key: int, dimensions: dict[str, int] | None) -> None:
        self._gang, self._key, self._dimensions = gang, key, dimensions
        self._most = MICRO_BATCHES_PER_STAGE * gang.num_workers if gang.split == "pipeline" else 1

    def __call__(self, inputs: Arrays) -> Arrays:
        parts = self._split_rows(inputs)
        found = self._gang.run(self._key, parts)
        if len(found) == 1:
            return found[0]
        return {name: self._join_rows(name, [each[name] for each in found]) for name in found[0]}

    def _split_rows(self, inputs: Arrays) -> Sequence[Arrays]:
        if self._dimensions is None or self._most == 1:
            return [inputs]
        first = next(iter(inputs))
        count = min(self._most, inputs[first].shape[self._dimensions[first]])
        cut = {name: np.array_split(array, count, self._dimensions[name]) for name, array in inputs.items()}
        return [{name: parts[index] for name, parts in cut.items()} for index in range(count)]

    def _join_rows(self, name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
        assert self._dimensions is not None
        return np.concatenate(parts, self._dimensions[name])


def _require(is_shared: bool, field: str, value: object) -> None:
    if not is_shared:
        problem = "is not for models that several workers share"
        raise ConfigError(field, value, problem, "leave it out, or give endpoint.num_workers=1")
