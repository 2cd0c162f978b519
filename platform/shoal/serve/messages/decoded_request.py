"""The tensors of one inference request and what its answer should have: the part of a call that the codecs decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

Arrays = Mapping[str, np.ndarray]


class DecodedRequest(msgspec.Struct, gc=False):
    """One request, checked against the model's signature.

    inputs:     by name, in the model's shapes, with `num_rows` rows; without a batch the request is one row
    outputs:    names of the requested outputs; None for all
    id:         sent back with the answer; of HTTP, as the rest
    timeout_us: the protocol's parameter `timeout`, unchecked; None without it
    action:     the parameter `action`: whether a policy takes its best action or samples; None as its version says
    seed:       the parameter `seed` of sampled actions; both unchecked
    binary:     whether outputs are sent as bytes, unless `binary_of` says otherwise for one
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
