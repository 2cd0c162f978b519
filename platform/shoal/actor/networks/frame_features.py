"""The convolutions of a policy, in NumPy: frames to flat arrays of features. Called by the actor's policies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shoal.errors import WeightsError
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
