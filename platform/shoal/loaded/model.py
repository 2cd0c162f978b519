"""A registered model as an object of this process: no endpoint, no Ray.

    policy = shoal.load("grid@champion")
    action = policy.act(observation)

Called through `shoal.load`. Policies act in NumPy where their version says how; torch is imported at the first use of
what needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from shoal.errors import ConfigError, RunError
from shoal.frame import find_names
from shoal.loaded.policy import Policy, open_policy
from shoal.plugins.find import find_in_library
from shoal.registry import ModelVersion, Registry, Signature

if TYPE_CHECKING:
    from torch import nn

    from shoal.client.streamed_text import Messages, StreamedText
    from shoal.serve.model.predictor import LoadedModel

Device = Literal["auto", "cpu", "cuda"]


def load(ref: str, *, device: Device = "cpu", seed: int | None = None) -> LocalModel:
    """Open a registered model on this machine, without an endpoint and without Ray.

    ref:    `name@champion`, `name@3`, `name` for the newest version, or the id of a run that registered it
    device: of what torch computes; a policy in NumPy needs none
    seed:   of sampled actions

    Raises RegistryError for an unknown model, WeightsError for a damaged one, ConfigError for code that does not run.

        policy = shoal.load("grid@champion")
        observation, info = environment.reset()
        while not done:
            observation, reward, terminated, truncated, info = environment.step(policy.act(observation))
    """
    return LocalModel(find_version(ref), device, seed)


def find_version(ref: str) -> ModelVersion:
    """The version that a reference of `load` names. Raises RegistryError, ConfigError for a run without a model."""
    import shoal.runs

    registry = Registry()
    if "@" not in ref and not registry.has(ref):
        try:
            run = shoal.runs.load(ref)
        except RunError:
            return registry.get(ref)  # which names similar models
        if not (models := run.list_models()):
            problem, remedy = "has registered no model", "name a model: `shoal models list`"
            raise ConfigError("model", run.id, problem, remedy)
        ref = f"{models[-1][0]}@{models[-1][1]}"
    return registry.get(ref)


class LocalModel:
    """One version of a model. `act` and `reset` are of policies, `predict` of every model. Not for several threads."""

    def __init__(self, version: ModelVersion, device: Device = "cpu", seed: int | None = None) -> None:
        self._version = version
        self._device = device
        self._seed = seed

    @property
    def name(self) -> str:
        return self._version.name

    @property
    def version(self) -> int:
        return self._version.version

    @property
    def signature(self) -> Signature:
        """The inputs and outputs of `predict`."""
        return self._version.manifest.signature

    @property
    def metrics(self) -> dict[str, float]:
        """Those with which the version was registered."""
        return dict(self._version.manifest.metrics)

    def __repr__(self) -> str:
        return f"shoal.load({self._version.ref!r})"

    @cached_property
    def model(self) -> nn.Module:
        """The network, in evaluation mode. Raises ConfigError for a version that is no module of PyTorch's."""
        from shoal.weights.tensor_files import read_tensors

        factory = self._version.manifest.model
        if factory.format != "module":
            raise ConfigError("model", self._version.ref, f"is a file of format {factory.format}", "use predict")
        network: Any = factory.build()
        network.load_state_dict(read_tensors(self._version.snapshot()))
        module: nn.Module = network.eval()
        return module

    def predict(self, rows: Any) -> Any:
        """The outputs for rows or arrays, with the registered preprocess and postprocess.

        rows: one row as it is, {"age": 72, "plan": "basic"}, which gets a dict; a list of rows, or of a model of raw
              rows a frame, whose further columns are left out, which get a list of dicts. Or arrays [rows, ...] by
              name, one array for a model with one input, or a frame with the columns of such a model, which get the
              outputs by name, arrays [rows, ...]

        Raises DataError that names a row's field, ConfigError for arrays that do not fit, InferenceError for what the
        model or its preprocess refuses.
        """
        if isinstance(rows, np.ndarray) and rows.ndim:  # as it is: a third of the time beside a small network
            name, dtype, row_shape = self._only_input
            if rows.dtype == dtype and rows.shape[1:] == row_shape:
                return self._opened.predict({name: rows})
        if self._are_records(rows):
            return self._predict_records(rows)
        from shoal.client.payload import as_arrays

        inputs = as_arrays(self.name, self.signature.inputs, rows)
        for spec in self.signature.inputs:
            shape = inputs[spec.name].shape if spec.name in inputs else None
            fits = shape is not None and len(shape) == len(spec.shape)
            if not fits or any(wanted not in (-1, size) for size, wanted in zip(shape or (), spec.shape, strict=True)):
                problem = "is missing" if shape is None else f"is {list(shape)}"
                raise ConfigError("rows", spec.name, problem, f"the model takes {spec.datatype} {spec.shape}")
        return self._opened.predict(inputs)

    def _are_records(self, rows: Any) -> bool:
        if isinstance(rows, np.ndarray):
            return False
        has_columns = any(each.kind for each in self.signature.inputs)
        if isinstance(rows, Mapping):
            return not any(np.ndim(each) for each in rows.values()) if rows else has_columns
        if isinstance(rows, list | tuple):
            return isinstance(rows[0], Mapping) if rows else has_columns
        return find_names(rows) is not None and has_columns

    def _predict_records(self, rows: Any) -> Any:
        """As the endpoint's path `rows` does, to which a client sends such a body."""
        from shoal.client.payload import encode_rows as encode_body
        from shoal.open_inference.rows import decode_rows, encode_rows

        (body,) = encode_body(rows, sys.maxsize, self.signature.inputs)
        decoded = msgspec.json.decode(body)
        listed = decoded if isinstance(decoded, list) else [decoded]
        outputs = self._opened.predict(decode_rows(self.signature.inputs, listed))
        answers = encode_rows(self.signature.outputs, outputs)
        return answers if isinstance(decoded, list) else answers[0]

    @cached_property
    def _only_input(self) -> tuple[str, np.dtype[Any], tuple[int, ...] | None]:
        """Its name, its dtype and a row's shape; no shape where there are several, or its values are converted."""
        from shoal.open_inference.datatypes import NUMPY_DTYPES

        first, *others = self.signature.inputs
        is_plain = not others and first.shape[:1] == [-1] and first.datatype not in ("BYTES", "BF16")
        return first.name, NUMPY_DTYPES[first.datatype], tuple(first.shape[1:]) if is_plain else None

    def chat(self, messages: Messages, **fields: Any) -> StreamedText:
        """The next message of a conversation, by a language model; see `Client.chat`.

            for part in shoal.load("smollm@champion").chat("What is a shoal?", max_tokens=60):
                print(part, end="", flush=True)

        Raises InferenceError, with the field at fault; ConfigError for a model that writes no text.
        """
        return self._write("messages", messages, fields)

    def generate(self, prompt: str, **fields: Any) -> StreamedText:
        """A text continued by a language model; see `Client.generate`. Raises as `chat`."""
        return self._write("prompt", prompt, fields)

    @property
    def has_chat(self) -> bool:
        """Whether a language model has a chat template. Raises ConfigError for a model that writes no text."""
        return bool(self._texts.has_chat)

    def _write(self, given: str, value: Any, fields: dict[str, Any]) -> StreamedText:
        from shoal.client.streamed_text import PATHS, StreamedText, build_body

        seed = {} if self._seed is None else {"seed": self._seed}
        return StreamedText(self._texts.stream(PATHS[given], build_body(self.name, given, value, seed | fields)))

    @cached_property
    def _texts(self) -> Any:
        from shoal.serve.spec.model_options import ModelOptions, TextOptions

        options = ModelOptions(device=self._device, text=TextOptions(slots=4))
        open_texts = find_in_library("local", "shoal.texts", "language", "local")
        return open_texts(self.name, Registry().location, options, self._opened)

    def act(
        self, observation: Any, *, deterministic: bool | None = None, mask: Any = None, stream: Hashable = 0
    ) -> Any:
        """The action of a policy for what the game shows, in the form that the game takes.

        observation:   of the game's own space; with one dimension more, as of a vector of games, a batch of them, whose
                       actions are [B, *act]
        deterministic: the best action, or a sampled one; None: as the version was registered
        mask:          the allowed choices, [K] or [B, K]: `info["action_mask"]`; one in a Dict observation is found
        stream:        whose observation it is, where several agents or games take turns, each with a state of its own

        A recurrent policy keeps the state of each stream: call `reset` where an episode begins. Raises ConfigError for
        a model that is no policy, an observation of another space, or a missing mask.
        """
        return self._policy.act(observation, deterministic, mask, stream)

    def decide(
        self,
        observation: Any,
        *,
        deterministic: bool | None = None,
        mask: Any = None,
        stream: Hashable = 0,
        is_flat: bool = False,
    ) -> tuple[Any, Mapping[str, np.ndarray]]:
        """As `act`, with all outputs of the network, as an endpoint computes them: by name, [B, ...] each, `logits`, or
        `mean` and `log_std`, and the `value`. Keeps states of its own; needs torch.

        is_flat: the observation is as actors have it, parts of a Dict end to end
        """
        return self._served_policy.decide(observation, deterministic, mask, stream, is_flat=is_flat)

    def reset(self, stream: Hashable | None = None, rows: Sequence[bool] | np.ndarray | None = None) -> None:
        """The next observation of this stream begins an episode; None: of all streams. rows: of a batch, bool [B]:
        those that begin one."""
        for name in ("_policy", "_served_policy"):
            if name in self.__dict__:  # one that was opened
                getattr(self, name).reset(stream, rows)

    def onnx(self, path: str | Path, **options: Any) -> Path:
        """Write the model as one ONNX file, whose answers were compared with these; returns its path.

        options: of `shoal.libs.export.export_model.ExportSpec`: `preprocess=""` leaves a hook out, `tolerance=1e-3`

        Raises ConfigError for a model that ONNX cannot be.
        """
        write = find_in_library("onnx", "shoal.converters", "export", "onnx")
        write(self._version, Path(path), **options)
        return Path(path)

    @cached_property
    def _policy(self) -> Policy:
        return open_policy(self._version, lambda: self._opened, self._seed)

    @cached_property
    def _served_policy(self) -> Policy:
        return open_policy(self._version, lambda: self._opened, self._seed, as_served=True)

    @cached_property
    def _opened(self) -> LoadedModel:
        return self.open()

    def open(self, *, warm_up: bool = False) -> LoadedModel:
        """Build it and load its weights, as an endpoint does. warm_up: it must answer an example, too. Raises
        ConfigError, WeightsError."""
        import torch

        from shoal.serve.model.predictor import Predictor
        from shoal.serve.spec.batch_layout import has_batch_first
        from shoal.serve.spec.model_options import ModelOptions

        manifest = self._version.manifest
        has_batch = all(map(has_batch_first, (*self.signature.inputs, *self.signature.outputs)))
        options = ModelOptions(
            device=self._device, warm_up=warm_up, finite=warm_up, max_batch_size=64 if has_batch else 0
        )
        predictor = Predictor(manifest.model, self.signature, options, torch.get_num_threads())
        is_module = manifest.model.format == "module"
        return predictor.load(self._version.weight_file() if is_module else self._version.snapshot())
