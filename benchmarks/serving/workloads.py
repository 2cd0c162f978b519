"""The models of serving's benchmarks, the requests for them, and one way to run a batch that every peer calls.

Runs in both environments: torch and numpy, never shoal. Every server gets the same bytes: the Open Inference Protocol's
JSON, or its binary form. Legend: B rows, T tokens, D width.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.model import ONE_MEGABYTE, SMALL, mlp

DTYPES = {"FP32": np.float32, "INT64": np.int64, "UINT8": np.uint8}
HEADER_END = b"}}]}"  # of the JSON before binary data, as `binary_body` writes it
VOCABULARY, LONGEST = 1000, 128


def megabyte() -> nn.Module:
    """1.0 MB of weights."""
    return mlp(ONE_MEGABYTE)


class Sleeper(nn.Module):
    """A model whose cost is known: `fixed_s`, and `row_s` for each row, without the processor, as on a GPU."""

    def __init__(self, fixed_s: float = 0.020, row_s: float = 0.0005) -> None:
        super().__init__()
        self.fixed_s, self.row_s = fixed_s, row_s
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.fixed_s + self.row_s * len(x))
        return x * self.scale


class Images(nn.Module):
    """LeNet-5 on bytes: x uint8 [B, 1, 28, 28]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x.float() / 255.0)
        return logits


class Text(nn.Module):
    """A transformer over tokens [B, T], where token 0 is padding and changes no other's answer."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.output = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding_BT = x == 0
        padding_BT[:, 0] = False  # of nothing but padding there would be no mean
        hidden_BTD = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        hidden_BTD = self.layers(hidden_BTD, src_key_padding_mask=padding_BT)
        weights_BT1 = (~padding_BT).float().unsqueeze(-1)
        mean_BD = (hidden_BTD * weights_BT1).sum(1) / weights_BT1.sum(1)
        logits: torch.Tensor = self.output(mean_BD)
        return logits


class Sum(nn.Module):
    """Next to no work on a lot of data: x [B, N] to [B, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * self.scale


class Numbered(nn.Module):
    """Answers with its only weight, in which a version writes its number: an answer tells which weights made it."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.ones(1))
        self.ballast = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.ballast[: x.shape[1], :4]) * 0.0 + self.number


@dataclass(frozen=True)
class Workload:
    """A model, what one request has, and how it is served.

    shape, out:    of input x and output y, without rows; -1 varies
    max_batch:     rows of a forward, for every server
    off_processor: the model waits for a device: a server that can must go on meanwhile
    """

    module: Callable[[], nn.Module]
    datatype: str
    shape: tuple[int, ...]
    out: tuple[int, ...]
    rows: int = 1
    max_batch: int = 64
    binary: bool = False
    off_processor: bool = False


WORKLOADS = {
    "mlp": Workload(mlp, "FP32", (SMALL[0],), (SMALL[-1],)),
    "megabyte": Workload(megabyte, "FP32", (ONE_MEGABYTE[0],), (ONE_MEGABYTE[-1],)),
    "mlp_binary": Workload(mlp, "FP32", (SMALL[0],), (SMALL[-1],), binary=True),
    "bodies": Workload(Sum, "FP32", (2_500_000,), (1,), max_batch=4, binary=True),
    "sleeper": Workload(Sleeper, "FP32", (4,), (4,), max_batch=32, off_processor=True),
    "images": Workload(Images, "UINT8", (1, 28, 28), (10,), rows=4),
    "text": Workload(Text, "INT64", (32,), (4,), max_batch=32),
    "ragged": Workload(Text, "INT64", (-1,), (4,), max_batch=32),
    "numbered": Workload(Numbered, "FP32", (4,), (4,)),
}


def examples(name: str, num: int = 32) -> list[np.ndarray]:
    """The inputs of `num` different requests."""
    load, generator = WORKLOADS[name], np.random.default_rng(0)
    found = []
    for _ in range(1 if name == "bodies" else num):
        shape = [load.rows, *(int(generator.integers(4, LONGEST + 1)) if size == -1 else size for size in load.shape)]
        if load.datatype == "INT64":
            found.append(generator.integers(1, VOCABULARY, shape))
        elif load.datatype == "UINT8":
            found.append(generator.integers(0, 256, shape).astype(np.uint8))
        else:
            found.append(np.round(generator.uniform(-0.5, 0.5, shape), 2).astype(np.float32))
    return found


def body_of(name: str, x: np.ndarray) -> bytes:
    """The request for `x`; binary data follows its JSON at once."""
    load = WORKLOADS[name]
    tensor: dict[str, Any] = {"name": "x", "shape": list(x.shape), "datatype": load.datatype}
    if load.binary:
        return binary_head(tensor, x) + x.tobytes()
    values = [round(one, 2) for one in x.ravel().tolist()] if load.datatype == "FP32" else x.ravel().tolist()
    return json.dumps({"inputs": [{**tensor, "data": values}]}).encode()


def binary_head(tensor: dict[str, Any], x: np.ndarray) -> bytes:
    """The JSON before the binary data; its length goes into a header of the request."""
    return json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": x.nbytes}}]}).encode()


def head_bytes(body: bytes) -> int:
    """Length of the JSON before the binary data."""
    return body.index(HEADER_END, 0, 1000) + len(HEADER_END)


def decode(name: str, body: bytes) -> np.ndarray:
    """As a peer reads a request: its framework's JSON is the standard library's, its arrays are numpy's."""
    if WORKLOADS[name].binary:
        end = head_bytes(body)
        tensor = json.loads(body[:end])["inputs"][0]
        return np.frombuffer(body, DTYPES[tensor["datatype"]], offset=end).reshape(tensor["shape"])
    return array_of(json.loads(body))


def array_of(content: dict[str, Any]) -> np.ndarray:
    """x of a request that a framework has parsed already."""
    tensor = content["inputs"][0]
    return np.array(tensor["data"], DTYPES[tensor["datatype"]]).reshape(tensor["shape"])


def answer_of(y: np.ndarray) -> dict[str, Any]:
    """What a peer answers: the same fields as the protocol has."""
    output = {"name": "y", "shape": list(y.shape), "datatype": "FP32", "data": y.ravel().tolist()}
    return {"model_name": "m", "model_version": "1", "outputs": [output]}


class Forward:
    """The model of a peer, and its batch function: rows of all requests in one forward, ragged ones padded."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        self._module = WORKLOADS[name].module().eval()
        self._ragged = -1 in WORKLOADS[name].shape

    def __call__(self, requests: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self._ragged:
            longest = max(x.shape[1] for x in requests)
            requests = [np.pad(x, ((0, 0), (0, longest - x.shape[1]))) for x in requests]
        with torch.inference_mode():
            y = self._module(torch.from_numpy(requests[0].copy() if len(requests) == 1 else np.concatenate(requests)))
        rows: list[np.ndarray] = np.split(y.numpy(), np.cumsum([len(x) for x in requests])[:-1])
        return rows
