"""What a worker sends of a gradient, in fewer bytes, and what it keeps for the next one.

`fp16` sends half of the bytes, `top_k` the elements of largest magnitude with their indices. What is not sent is added
to the next gradient (error feedback), so nothing is lost, only late: Seide et al., "1-Bit SGD" (Interspeech 2014);
Stich et al., "Sparsified SGD with memory", 1809.07599, algorithm 1. Called by `worker` and by the server.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

Compression = Literal["none", "fp16", "top_k"]
MAX_FP16 = 65_504.0
_INDEX_BYTES = 4  # int32


class GradientCompressor:
    """Of one worker's gradients for one server, of `size` elements.

    fraction: of the elements that `top_k` sends
    """

    def __init__(self, kind: Compression, size: int, fraction: float) -> None:
        self._kind, self._num_sent = kind, max(1, round(fraction * size))
        self.residual = torch.zeros(size if kind != "none" else 0)  # [size]: the sum of gradients that is not sent yet

    def compress(self, gradient: Tensor) -> bytes:
        """What to send for `gradient` [size], float32, which is changed to what the server will have."""
        if self._kind == "none":
            return gradient.numpy().tobytes()
        gradient += self.residual
        if self._kind == "fp16":
            payload = gradient.clamp(-MAX_FP16, MAX_FP16).half().numpy().tobytes()
        else:
            indices = gradient.abs().topk(self._num_sent, sorted=False).indices
            payload = indices.int().numpy().tobytes() + gradient[indices].numpy().tobytes()
        self.residual.copy_(gradient)
        decompress(self._kind, payload, gradient)
        self.residual -= gradient
        return payload


def decompress(kind: Compression, payload: bytes | memoryview, gradient: Tensor) -> None:
    """Write what was sent into `gradient` [size], float32."""
    if kind == "none":
        gradient.copy_(_read(payload, np.float32))
    elif kind == "fp16":
        gradient.copy_(_read(payload, np.float16))
    else:
        half = len(payload) // 2
        gradient.zero_()
        indices = _read(payload[:half], np.int32).long()
        gradient[indices] = _read(payload[half:], np.float32)


def count_payload_bytes(kind: Compression, size: int, fraction: float) -> int:
    """Bytes of a compressed gradient of `size` elements."""
    if kind == "top_k":
        return max(1, round(fraction * size)) * (_INDEX_BYTES + 4)
    return size * (2 if kind == "fp16" else 4)


def _read(payload: bytes | memoryview, kind: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.frombuffer(payload, kind).copy())
