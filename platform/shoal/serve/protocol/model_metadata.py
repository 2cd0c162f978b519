"""The protocol's metadata of a model and its server, and the configuration extension.

Called by the REST application and the gRPC service, which write the same content. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shoal.open_inference.messages import PLATFORM, ModelMetadata, TensorMetadata
from shoal.registry.manifest import TensorSignature
from shoal.serve.messages.inference import ServedModelProtocol

EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]


def build_metadata(model: ServedModelProtocol) -> ModelMetadata:
    """Build a model's metadata: inputs, outputs and versions."""
    signature = model.signature
    versions = [str(version) for version in model.versions]
    return ModelMetadata(
        model.name, versions, PLATFORM, to_tensor_metadata(signature.inputs), to_tensor_metadata(signature.outputs)
    )


def to_tensor_metadata(tensors: Sequence[TensorSignature]) -> list[TensorMetadata]:
    return [TensorMetadata(tensor.name, tensor.datatype, tensor.shape, tensor.columns) for tensor in tensors]


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
