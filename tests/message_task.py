"""LeNet on pictures that arrive as MQTT messages: `TOPIC/CLASS`, 28 x 28 bytes each."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shoal
from shoal.models.lenet import LeNet
from shoal.sources import MqttSource, MqttSpec

IMAGE_BYTES = 28 * 28


def decode(topic: str, payload: bytes) -> tuple[Tensor, int, int]:
    """The picture, its class, and the number that its first two pixels are."""
    if len(payload) != IMAGE_BYTES:
        raise ValueError(f"has {len(payload)} bytes, not {IMAGE_BYTES}")
    pixels = np.frombuffer(payload, np.uint8)
    image = torch.from_numpy(pixels.astype(np.float32)).view(1, 28, 28) / 255
    return image, int(topic.rpartition("/")[2]), 256 * int(pixels[0]) + int(pixels[1])


def make_source(broker: str, name: str, timeout_s: float = 30.0) -> MqttSource:
    spec = MqttSpec(broker=broker, topic=f"{name}/+", client_id=name, receive_maximum=1000, connect_timeout_s=timeout_s)
    return MqttSource(spec, decode)


class Pictures(shoal.Task):
    """notes: a file to which each step's numbers are written; wait_at: the step that never ends"""

    def __init__(self, *, broker: str, name: str, notes: str, wait_at: int = 0) -> None:
        self.broker = broker
        self.name = name
        self.notes = Path(notes)
        self.wait_at = wait_at
        self._num_steps = 0

    def model(self) -> nn.Module:
        return LeNet()

    def data(self) -> shoal.Data:
        return shoal.Data(train=make_source(self.broker, self.name))

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch[0],)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if torch.is_grad_enabled() and outputs.requires_grad:
            self._num_steps += 1
            with self.notes.open("a") as file:
                file.write(json.dumps(batch[2].tolist()) + "\n")
            if self._num_steps == self.wait_at:
                signal.pause()
        return nn.functional.cross_entropy(outputs, batch[1])
