"""A registered model as a function of batches: loads versions, whose outputs exactly fit the signature.

Owns the template into which versions are loaded, and all steps around a forward. Called by loaders of versions
(`load`), by the batcher's threads (`predict_batch`) and by batch prediction; never reads a source or a socket. A loaded
version never changes and shares no memory that a later one overwrites, so a batch is computed by exactly one version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import torch
from torch import nn

from shoal.device_memory import explain_out_of_memory
from shoal.errors import ConfigError, InferenceError, ModelError, WeightsError
from shoal.open_inference.messages import TensorMetadata
from shoal.registry.code_import import activate_code
from shoal.registry.manifest import ModelFactory, Signature
from shoal.runs.formatting import format_size
from shoal.serve.messages.infer_call import Arrays, Outputs
from shoal.serve.model.action_sampler import ActionSampler, make_sampler
from shoal.serve.model.column_drift import ColumnDrift, CountColumns
from shoal.serve.model.device import devices, is_device_lost, select_fastest, time_forwards
from shoal.serve.model.formats import Forward, Template, TemplateConfig, has_cuda, open_template
from shoal.serve.model.formats.template import InputLimits
from shoal.serve.model.hooks import Hook, find_hook
from shoal.serve.model.output_check import NotFiniteOutput, OutputCheck
from shoal.serve.model.padding import PaddingCostModel, RequestCollator
from shoal.serve.model.warm_up import batch_sizes, has_one_shape, make_example, time_warm_forwards
from shoal.serve.spec.batch_layout import BatchLayout
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

logger = logging.getLogger(__name__)
OpenTemplate = Callable[[TemplateConfig], Template]


class Predictor:
    """The template of one model, for any number of versions and threads. Requests are batch-first: see `layout`.

    `warm_up_times` has the warm forwards of the first version as (rows, seconds); empty before, and when the size of a
    typical request is unknown. `can_be_shared`: whether models that are built alike may have it, since no hook has a
    state, and the order in which they load changes nothing.

    after: the previous predictor, when the model is now built in another way: if that one answered an example, this one
           must too
    share: opens the template of a model that several workers share; None for one of this process

    Raises ConfigError when the model cannot be built, or not with these options.
    """

    def __init__(
        self,
        factory: ModelFactory,
        signature: Signature,
        options: ModelOptions,
        torch_threads: int = 1,
        after: Predictor | None = None,
        share: OpenTemplate | None = None,
    ) -> None:
        self.factory = factory
        self.signature = signature
        self.options = options
        self.torch_threads = torch_threads
        self.layout = layout = BatchLayout(signature, options)
        pad_value = options.pad_value if options.ragged == "pad" else None
        collator = RequestCollator(layout.signature, pad_value, layout.shared_inputs)
        outputs = [TensorMetadata(each.name, each.datatype, each.shape) for each in signature.outputs]
        preprocess = find_hook("preprocess", factory, options)
        drift = ColumnDrift(layout.signature, preprocess.ranges if preprocess is not None else {})
        self._steps = steps = ForwardSteps(
            layout,
            collator,
            PaddingCostModel(layout.signature) if collator.can_pad else None,
            OutputCheck(outputs, layout.dimensions, finite=options.finite),
            preprocess,
            find_hook("postprocess", factory, options),
            None if drift.is_empty else drift,
        )
        self.sampler = make_sampler(factory, signature, options.action)
        has_hooks = steps.preprocess is not None, steps.postprocess is not None
        self._is_shared, open_one = share is not None, share or open_template
        self._templates: dict[str, Template] = {}
        with activate_code(factory.code):  # a format of the user's own is code, too
            for device in devices(options, share is None and has_cuda(factory.format)):
                config = TemplateConfig(factory, signature, options, device, torch_threads, *has_hooks)
                try:
                    self._templates[device] = open_one(config)
                except torch.OutOfMemoryError as error:
                    raise ConfigError("device", device, explain_out_of_memory(error, "the model")) from None
        self._load_lock = threading.Lock()
        self._is_warm = False
        self._has_example = options.warm_up
        # Else an example may be unlike any real request: its failure proves nothing.
        is_typical = steps.preprocess is None and has_one_shape(layout.signature)
        self.can_be_shared = is_typical and steps.postprocess is None and not self._is_shared
        self._must_answer = is_typical or (after is not None and after._is_warm)
        self.warm_up_times: list[tuple[int, float]] = []

    def set_torch_threads(self) -> None:
        """Fix the number of torch threads, which is per calling thread: call it in the forward's thread."""
        torch.set_num_threads(self.torch_threads)

    @property
    def has_even_forwards(self) -> bool:
        """Whether the rows alone decide how long a forward takes: on this process's CPU, without hooks, and all rows
        have one shape."""
        has_hooks = self._steps.preprocess is not None or self._steps.postprocess is not None
        is_here = set(self._templates) == {"cpu"} and not self._is_shared
        return is_here and not has_hooks and has_one_shape(self.layout.signature)

    def compute_bucket(self, inputs: Arrays) -> Hashable:
        """The key that requests must have in common to share a batch: their shapes, where those differ and are not
        padded."""
        return self._steps.collator.compute_bucket(inputs)

    def load(self, snapshot: WeightSnapshot) -> LoadedModel:
        """Load a version and let it answer an example; the first version answers one at every power of two of the
        batch.

        Raises WeightsError, without a change, when it does not fit the model or its answer does not fit the signature.
        Sets the calling thread's number of torch threads, for which a graph is compiled.
        """
        self.set_torch_threads()
        with self._load_lock:
            if len(self._templates) > 1:  # the first version selects a device
                self._templates = self._select_template(snapshot)
            (template,) = self._templates.values()
            model = self._load_version(template, snapshot)
            try:
                self._warm_up(model)
            except InferenceError as error:  # a worker of this replica was lost, whatever the version is like
                logger.warning("version %d is loaded and warmed up again: %s", snapshot.version, error)
                model = self._load_version(template, snapshot)
                self._warm_up(model)
            return model

    def _load_version(self, template: Template, snapshot: WeightSnapshot) -> LoadedModel:
        try:
            forward = template.load(snapshot)
        except torch.OutOfMemoryError as error:
            what = f"version {snapshot.version}, whose weights are {format_size(snapshot.size_bytes)}"
            raise WeightsError(explain_out_of_memory(error, what)) from None
        return LoadedModel(snapshot.version, forward, self._steps, self.sampler)

    def _warm_up(self, model: LoadedModel) -> None:
        """Run one row of every version, and every size of the first: later ones reuse its kernels.

        With CUDA graphs every size of all: a version has graphs of its own, unless it takes those of a released one.
        """
        if not self._has_example:
            return
        signature = self.layout.signature
        is_all = not self._is_warm or self.options.cuda_graphs
        sizes = batch_sizes(self.options.max_rows) if is_all else [1]
        try:
            examples = {size: [make_example(signature.inputs, size)] for size in sizes}
            for size in sizes:
                model.predict_batch(examples[size])
            if has_one_shape(signature) and not self._is_warm:
                self.warm_up_times = time_warm_forwards(lambda size: model.predict_batch(examples[size]), sizes)
        except ConfigError:  # of an option that this model does not admit
            raise
        except Exception as error:  # any error on an example is the reason not to serve
            if isinstance(error, InferenceError) and error.status == HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            if not self._is_warm and not self._must_answer:
                self._has_example = False
                logger.warning("not warmed up, since it rejects an example generated from its signature: %s", error)
                return
            what = error if isinstance(error, NotFiniteOutput) else f"{type(error).__name__}: {error}"
            remedy = "`warm_up: false` serves it all the same"
            raise WeightsError(f"version {model.version} cannot answer an example: {what}. {remedy}") from error
        self._is_warm = True

    def _select_template(self, snapshot: WeightSnapshot) -> dict[str, Template]:
        """Select the template of the fastest device for these weights, of those that can answer."""
        sizes = sorted({1, self.options.max_rows})
        inputs = {size: [make_example(self.layout.signature.inputs, size)] for size in sizes}
        times = {}
        rejection: WeightsError | None = None
        for device, template in self._templates.items():
            try:
                model = self._load_version(template, snapshot)
                times[device] = time_forwards(lambda size, model=model: model.predict_batch(inputs[size]), sizes)  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - on any error it cannot be measured here
                rejection = error if rejection is None and isinstance(error, WeightsError) else rejection
                logger.warning("%s cannot be measured: it does not answer an example (%s)", device, error)
        if rejection is not None and not times:
            raise rejection
        chosen, why = select_fastest(times) if times else ("cuda", "not measured: cuda")
        logger.info("device: %s", why)
        return {chosen: self._templates[chosen]}


@dataclass(frozen=True, slots=True)
class ForwardSteps:
    """What a model does around each forward; all its versions share it. padding_cost: None where no batch is padded;
    drift: None where no input is a column of a table."""

    layout: BatchLayout
    collator: RequestCollator
    padding_cost: PaddingCostModel | None
    check: OutputCheck
    preprocess: Hook | None
    postprocess: Hook | None
    drift: ColumnDrift | None


class LoadedModel:
    """One version of a model, ready to answer. Immutable and thread-safe.

    size_limits: the sizes of a request's inputs that it takes, which the caller checks; None for any
    module:      what computes it, where that is a module that runs eagerly in this process; None for others. It is not
                 to be changed
    sampler:     of a policy with a distribution: draws actions, for the caller to apply
    snapshot:    of a version of a run: its weights as received, which other replicas may need
    """

    snapshot: WeightSnapshot

    def __init__(self, version: int, forward: Forward, steps: ForwardSteps, sampler: ActionSampler | None) -> None:
        self.version = version
        self._forward = forward
        self._steps = steps
        self.sampler = sampler
        self._layout, self._input_names = steps.layout, steps.collator.names
        self.size_limits: InputLimits | None = None
        self.module: nn.Module | None = getattr(forward, "module", None)
        if steps.preprocess is None:  # a hook's arrays are no request's
            self.size_limits = getattr(forward, "limits", None)

    def predict(self, request: Arrays) -> Outputs:
        """Answer one request as `predict_batch` does, without its counts."""
        inputs = {name: request[name] for name in self._input_names}
        return self._predict(inputs, len(inputs[self._input_names[0]]))

    def predict_batch(self, requests: Sequence[Arrays], count_columns: CountColumns | None = None) -> list[Outputs]:
        """Answer several requests of one bucket as one batch along the first dimension, or as several where that saves
        more padding than it costs (see `padding_cost`).

        count_columns: receives what training has not seen in the columns of a table

        Raises InferenceError (500) naming the output that does not fit the signature, a hook's error (422, 500), or the
        model's error.
        """
        cost = self._steps.padding_cost
        if cost is None:
            return self._predict_collated(requests, count_columns)
        answers: dict[int, Outputs] = {}
        for part in cost.split_batch(requests):
            chosen = [requests[index] for index in part]
            began_s = time.perf_counter()
            answers.update(zip(part, self._predict_collated(chosen, count_columns), strict=True))
            cost.observe(chosen, time.perf_counter() - began_s)
        return [answers[index] for index in range(len(requests))]

    def _predict_collated(self, requests: Sequence[Arrays], count_columns: CountColumns | None) -> list[Outputs]:
        drift = self._steps.drift
        if len(requests) == 1:
            inputs = requests[0]
            try:
                answers = [self.predict(inputs)]
            except InferenceError as error:
                if drift is not None and count_columns is not None and error.field:
                    count_columns(self.version, drift.count_rejection(error.field))
                raise
        else:
            collator = self._steps.collator
            batch = collator.collate(requests)
            inputs = batch.inputs
            answers = collator.split(self._predict(inputs, batch.bounds[-1]), batch, requests)
        if drift is not None and count_columns is not None:
            count_columns(self.version, drift.count(inputs))
        return answers

    def _predict(self, rows: Outputs, num_rows: int) -> Outputs:
        steps, layout = self._steps, self._layout
        if num_rows == 0:
            return layout.to_batch_first(steps.check.make_empty_outputs(), 0)
        inputs: Arrays = rows if layout.is_first else layout.to_model_shapes(rows)
        try:
            if steps.preprocess is not None:
                # It may write to them, and another version or a shadow reads them too.
                inputs = steps.preprocess({name: array.copy() for name, array in inputs.items()})
            outputs = self._forward(inputs)
            if steps.postprocess is not None:
                outputs = steps.postprocess(outputs)
        except torch.OutOfMemoryError as error:  # a batch of several requests is tried in halves
            problem = explain_out_of_memory(error, f"{num_rows} rows")
            logger.warning("version %d: %s", self.version, problem)
            raise InferenceError(500, problem) from None
        except torch.AcceleratorError:
            if not is_device_lost():
                raise
            logger.exception("version %d: the GPU fails from now on", self.version)
            raise InferenceError(503, "this replica's GPU has failed; another replica takes over", 1.0) from None
        except SystemExit as error:  # it would end the computing thread and the awaiting task
            raise ModelError(500, f"the model raised {error!r}") from error
        checked = steps.check.validate(outputs, num_rows)
        return checked if layout.is_first else layout.to_batch_first(checked, num_rows)
