"""A small residual convolutional network over frames. Called by the models; an actor computes the same in NumPy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class FrameEncoder(nn.Module):
    """Features [B, size] of frames [B, *shape], of any number type, each number multiplied by `scale`.

    shape:         [H, W, C], or [C, H, W] unless `channels_last`
    convolutions:  of each layer the output channels, the stride and whether it is residual; kernels are 4 x 4 where the
                   stride is 2, and else 3 x 3; one row or column of zeros pads each side
    A layer gives max(0, conv(x)), or, if it is residual, max(0, x + conv(x)), as in He et al. (1512.03385, figure 2)
    with one convolution in a block.
    """

    def __init__(
        self, shape: Sequence[int], channels_last: bool, scale: float, convolutions: Sequence[tuple[int, int, bool]]
    ) -> None:
        super().__init__()
        height, width, channels = shape if channels_last else (*shape[1:], shape[0])
        self._channels_last, self._scale = channels_last, scale
        self._is_residual = [is_residual for _, _, is_residual in convolutions]
        self.layers = nn.ModuleList()
        for num_channels, stride, _ in convolutions:
            layer = nn.Conv2d(channels, num_channels, 4 if stride == 2 else 3, stride, padding=1)
            nn.init.orthogonal_(layer.weight, math.sqrt(2))
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
            self.layers.append(layer)
            channels = num_channels
            height = height // stride
            width = width // stride
        self.size = channels * height * width

    def forward(self, frames: Tensor) -> Tensor:
        x = frames.float() * self._scale
        if self._channels_last:
            x = x.permute(0, 3, 1, 2)
        for layer, is_residual in zip(self.layers, self._is_residual, strict=True):
            x = torch.relu(x + layer(x) if is_residual else layer(x))
        return x.flatten(1)


def make_encoder(frames: Mapping[str, Any] | None, observation_size: int) -> tuple[FrameEncoder | None, int]:
    """The encoder with these arguments, None without any, and how many numbers the layers after it take."""
    if frames is None:
        return None, observation_size
    encoder = FrameEncoder(**frames)
    return encoder, encoder.size


class RecurrentLayer(nn.Module):
    """`kind` is "gru" or "lstm". Legend: T steps of B sequences, H outputs, S = H of a GRU (h), 2 H of an LSTM (h, c).

    `rnn` has torch's names of the tensors, as in `core_tensors` of a policy.
    """

    def __init__(self, kind: str, input_size: int, size: int) -> None:
        super().__init__()
        self._is_lstm = kind == "lstm"
        self.rnn = nn.LSTM(input_size, size) if self._is_lstm else nn.GRU(input_size, size)
        self.state_size = 2 * size if self._is_lstm else size

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [T, B, H] at x [T, B, input_size], and the states after them [B, S]; state [B, S] is that before."""
        if len(x) == 1 and torch.onnx.is_in_onnx_export():
            return self._trace_step(x[0], state)
        if not self._is_lstm:
            outputs, h = self.rnn(x, state[None].contiguous())
            return outputs, h[0]
        h, c = state[None].chunk(2, -1)
        outputs, (h, c) = self.rnn(x, (h.contiguous(), c.contiguous()))
        return outputs, torch.cat([h[0], c[0]], -1)

    def _trace_step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step by operations that every engine of games has: Unity's has no GRU."""
        size = self.rnn.hidden_size
        h = state[:, :size]
        weight_x, weight_h, bias_x, bias_h = self.rnn.all_weights[0]
        from_x, from_h = nn.functional.linear(x, weight_x, bias_x), nn.functional.linear(h, weight_h, bias_h)
        if self._is_lstm:
            admit, retain, cell, output = (from_x + from_h).split(size, -1)
            c = torch.sigmoid(retain) * state[:, size:] + torch.sigmoid(admit) * torch.tanh(cell)
            h = torch.sigmoid(output) * torch.tanh(c)
            return h[None], torch.cat([h, c], -1)
        gates = torch.sigmoid(from_x[:, : 2 * size] + from_h[:, : 2 * size])
        new = torch.tanh(from_x[:, 2 * size :] + gates[:, :size] * from_h[:, 2 * size :])
        h = new + gates[:, size:] * (h - new)
        return h[None], h
