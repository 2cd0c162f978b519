"""One inference request to a served model: the codecs begin it with its tensors, `protocol.pipeline` completes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

Arrays = Mapping[str, np.ndarray]
Outputs = dict[str, np.ndarray]


class InferCall(msgspec.Struct, gc=False):
    """One request, checked against the model's signature. (A frozen dataclass takes 1 µs to construct, this 0.1.)

    inputs:     by name, in the model's shapes, with `num_rows` rows; without a batch the request is one row
    outputs:    names of the requested outputs; None for all
    id:         sent back with the answer; of HTTP, as the rest
    timeout_us: the protocol's parameter `timeout`, unchecked; None without it
    action:     the parameter `action`: whether a policy takes its best action or samples; None as its version says
    seed:       the parameter `seed` of sampled actions; both unchecked
    binary:     whether outputs are sent as bytes, unless `binary_of` says otherwise for one

    Of its head:

    version:    answer with exactly this version, which the protocol has found; None leaves the choice to the rollout
    deadline_s: `time.monotonic()` at which the request expires; None for never
    tenant:     the name of the API key, whose share of a busy replica it uses
    sticky:     calls with the same key get the same side of a canary; "" draws for each call
    track:      "stable" or "candidate" for one side of a canary; "" leaves it to the rollout
    trace:      its span, a `RequestTraceProtocol`; None when it is not traced
    """

    inputs: Arrays
    num_rows: int
    outputs: frozenset[str] | None = None
    id: str | None = None
    timeout_us: object = None
    action: object = None
    seed: Any = None
    binary: bool = False
    binary_of: Mapping[str, bool] = {}
    version: int | None = None
    deadline_s: float | None = None
    tenant: str = ""
    sticky: str = ""
    track: str = ""
    trace: Any = None
