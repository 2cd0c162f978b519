"""The protocol's metadata, configuration and statistics of models, and the index of the repository.

Called by the REST application and the gRPC service, which write the same content. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shoal.open_inference.messages import PLATFORM, IndexedModel, ModelMetadata, TensorMetadata, VersionStatistics
from shoal.registry.manifest import TensorSignature
from shoal.serve.messages.inference import Caller, ModelManagerProtocol, ServedModelProtocol
from shoal.serve.messages.model_errors import find_version

EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]


def build_metadata(model: ServedModelProtocol) -> ModelMetadata:
    """Build a model's metadata: inputs, outputs and versions."""
    signature = model.signature
    versions = [str(version) for version in model.versions]
    return ModelMetadata(
        model.name, versions, PLATFORM, to_tensor_metadata(signature.inputs), to_tensor_metadata(signature.outputs)
    )


def list_statistics(
    manager: ModelManagerProtocol, caller: Caller, model: str | None, version: str | None
) -> list[VersionStatistics]:
    """The statistics of a model's versions, or of all models that the caller may see. Raises InferenceError (404)."""
    if not model:
        served = [each for each in manager.list_models() if caller.can_see(each.name)]
    else:
        served = [manager.get_model(model)]
        version = str(find_version(model, version, served[0].versions)) if version else None
    return [each for model in served for each in model.statistics() if not version or each.version == version]


def list_index(manager: ModelManagerProtocol, caller: Caller, is_ready: bool) -> list[IndexedModel]:
    """The repository's index, as far as the caller may see it; `is_ready`: only versions that can answer now."""
    return [
        IndexedModel(entry.name, entry.version, entry.state, entry.reason)
        for entry in manager.list_repository()
        if caller.can_see(entry.name) and (entry.state == "READY" or not is_ready)
    ]


def to_tensor_metadata(tensors: Sequence[TensorSignature]) -> list[TensorMetadata]:
    return [
        TensorMetadata(tensor.name, tensor.datatype, tensor.shape, tensor.columns, tensor.kind) for tensor in tensors
    ]


def build_model_config(model: ServedModelProtocol) -> dict[str, Any]:
    """Build the configuration of the version that answers by default.

    `dims` are without the batch. Triton knows a batch in dimension 0 alone: with another one, as without any, its
    clients read `max_batch_size: 0` and every dimension.
    """
    options = model.options
    policy: dict[str, Any] = {"max_queue_size": options.max_queue_size, "allow_timeout_override": True}
    if options.deadline_s is not None:
        policy["default_timeout_microseconds"] = round(options.deadline_s * 1e6)
    settings: dict[str, str] = {"precision": options.precision, "device": options.device, "ragged": options.ragged}
    max_rows = 0 if options.batch_dim else options.max_batch_size
    if options.batch_dim:
        settings["batch_dim"] = json.dumps(options.batch_dim)
    config = {
        "name": model.name,
        "platform": PLATFORM,
        "backend": "pytorch",
        "max_batch_size": max_rows,
        "input": [_to_tensor_config(tensor, max_rows) for tensor in model.signature.inputs],
        "output": [_to_tensor_config(tensor, max_rows) for tensor in model.signature.outputs],
        "parameters": {name: {"string_value": value} for name, value in settings.items()},
        "model_transaction_policy": {"decoupled": False},
    }
    if max_rows:
        # A free replica takes queued requests at once: there is no delay to report.
        config["dynamic_batching"] = {"max_queue_delay_microseconds": 0, "default_queue_policy": policy}
    return config


def _to_tensor_config(tensor: TensorSignature, max_rows: int) -> dict[str, Any]:
    datatype = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    return {
        "name": tensor.name,
        "data_type": f"TYPE_{datatype}",
        "dims": tensor.shape[1:] if max_rows else tensor.shape,
    }
