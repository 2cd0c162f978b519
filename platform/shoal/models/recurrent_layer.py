"""A GRU or an LSTM whose state is one flat tensor.

Called by the recurrent models; an actor computes the same in NumPy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
        if not self._is_lstm:
            outputs, h = self.rnn(x, state[None].contiguous())
            return outputs, h[0]
        h, c = state[None].chunk(2, -1)
        outputs, (h, c) = self.rnn(x, (h.contiguous(), c.contiguous()))
        return outputs, torch.cat([h[0], c[0]], -1)
