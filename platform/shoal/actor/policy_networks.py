"""What an actor's policy computes beyond layers: features of frames in NumPy, and graphs of a user's own network.

Called by the policies. A graph is an ONNX model, run by onnxruntime: its weights are inputs, so that the session is
opened once, and a new version is only other tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.errors import ConfigError, WeightsError, format_install
from shoal.wire.experience_spec import PolicySpec

Kernel = tuple[np.ndarray, np.ndarray, int, bool]  # weight [out, in · k · k], bias [out, 1], k, is residual


def load_kernels(spec: PolicySpec, version: int, tensors: Mapping[str, np.ndarray]) -> list[Kernel]:
    """The weights of the convolutions. Raises WeightsError when one is missing or does not fit."""
    kernels: list[Kernel] = []
    for each in spec.convolutions:
        if each.weight not in tensors or each.bias not in tensors:
            raise WeightsError(f"version {version} has no {each.weight!r} or no {each.bias!r}")
        weight, bias = tensors[each.weight], tensors[each.bias]
        if weight.ndim != 4 or weight.shape[2] != weight.shape[3] or bias.shape != weight.shape[:1]:
            raise WeightsError(f"version {version}: {each.weight} is {weight.shape}, its bias {bias.shape}")
        flat = np.ascontiguousarray(weight.reshape(len(weight), -1))
        kernels.append((flat, bias[:, None], weight.shape[2], each.residual))
    return kernels


def compute_features(frames: np.ndarray, spec: PolicySpec, kernels: list[Kernel]) -> np.ndarray:
    """Features [B, size] float32 of frames [B, H, W, C] or [B, C, H, W]."""
    x = np.asarray(frames, np.float32) * np.float32(spec.observation_scale)
    if spec.channels_last:
        x = x.transpose(0, 3, 1, 2)
    for layer, (weight, bias, size, is_residual) in zip(spec.convolutions, kernels, strict=True):
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (2, 3))
        windows = windows[:, :, :: layer.stride, :: layer.stride]  # [B, C, H', W', k, k]
        height, width = windows.shape[2:4]
        columns = windows.transpose(0, 1, 4, 5, 2, 3).reshape(len(x), -1, height * width)
        y = (weight @ columns + bias).reshape(len(x), -1, height, width)
        x = np.maximum(y + x if is_residual else y, 0.0)
    features: np.ndarray = x.reshape(len(x), -1)
    return features


_DTYPES = {"tensor(float)": "float32", "tensor(uint8)": "uint8", "tensor(int64)": "int64", "tensor(bool)": "bool"}
_OBSERVATION, _OUTPUTS = "observation", "outputs"


class GraphNetwork:
    """Raises ConfigError where onnxruntime is not installed, or refuses the graph."""

    def __init__(self, graph: bytes) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            problem = f"is a graph, which needs onnxruntime ({error})"
            raise ConfigError("policy", "graph", problem, format_install("onnx")) from None
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
