"""A policy's network that travels as an ONNX graph, run by onnxruntime. Called by the policies of actors.

The graph's weights are inputs: the session is opened once, and a new version is only other tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.errors import ConfigError, WeightsError

_DTYPES = {"tensor(float)": "float32", "tensor(uint8)": "uint8", "tensor(int64)": "int64", "tensor(bool)": "bool"}
_OBSERVATION, _OUTPUTS = "observation", "outputs"


class GraphNetwork:
    """Raises ConfigError where onnxruntime is not installed, or refuses the graph."""

    def __init__(self, graph: bytes) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            remedy = "pip install 'CHECKOUT[onnx]', with the folder of Shoal's sources"
            problem = f"is a graph, which needs onnxruntime ({error})"
            raise ConfigError("policy", "graph", problem, remedy) from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no common base
            problem = f"onnxruntime {onnxruntime.__version__} refuses the graph: {error}"
            raise ConfigError("policy", "graph", problem) from error
        inputs = {each.name: each for each in self._session.get_inputs()}
        self._dtype = np.dtype(_DTYPES[inputs.pop(_OBSERVATION).type])
        self._wanted = {name: (_DTYPES.get(each.type), tuple(each.shape)) for name, each in inputs.items()}
        self._feeds: dict[str, np.ndarray] = {}

    def load(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Use these weights from now on. Raises WeightsError when one is missing or does not fit."""
        feeds: dict[str, np.ndarray] = {}
        for name, (dtype, shape) in self._wanted.items():
            tensor = tensors.get(name)
            if tensor is None:
                raise WeightsError(f"version {version} has no {name!r}")
            if tensor.dtype.name != dtype or tensor.shape != shape:
                raise WeightsError(
                    f"version {version}: {name} is {tensor.dtype} {tensor.shape}, the graph wants {dtype} {shape}"
                )
            feeds[name] = tensor
        self._feeds = feeds

    def compute(self, observations: np.ndarray) -> np.ndarray:
        """Outputs [N, K] of observations [N, *obs]."""
        feeds: dict[str, Any] = {**self._feeds, _OBSERVATION: np.ascontiguousarray(observations, self._dtype)}
        outputs: np.ndarray = self._session.run([_OUTPUTS], feeds)[0]
        return outputs
