"""The format of a run's experience: dtype, shape and range of observations and actions, and the policy.

The learner's side defines it; the gateway sends it in `welcome` and validates every segment against it. Plain msgspec
structs: they travel as msgpack maps, so any language can read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

# Names on the wire -> NumPy's little-endian type strings. Other dtypes are not supported.
DTYPES = {
    "float32": "<f4",
    "float64": "<f8",
    "float16": "<f2",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "|b1",
}

_NUMPY = {name: np.dtype(each) for name, each in DTYPES.items()}
NO_EXTRAS: Mapping[str, Any] = MappingProxyType({})
STATE = "state"  # the extra of recurrent policies
EXPERIENCE_FILE = "experience.json"  # of a registered policy: the ExperienceSpec of its run


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a step: `shape` without the time axis; `low` and `high` are inclusive, None means unbounded."""

    dtype: str
    shape: tuple[int, ...] = ()
    low: float | None = None
    high: float | None = None

    def numpy_dtype(self) -> np.dtype[Any]:
        return _NUMPY[self.dtype]


class ConvolutionSpec(msgspec.Struct, frozen=True):
    """One layer over a frame: max(0, conv(x)), or max(0, x + conv(x)) if it is residual; zeros pad each side by one.

    `weight` names a tensor [out, in, k, k] in the safetensors payload, `bias` one of [out].
    """

    weight: str
    bias: str
    stride: int = 1
    residual: bool = False


class PolicySpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an actor turns an observation into an action with the weights it pulled.

    kind:       with "recurrent_" for "mlp_": the same, with a recurrent `core` among its layers
                "mlp_categorical": the layers' outputs are logits of a categorical distribution over [0, n)
                "mlp_multi_categorical": of several independent ones, of `action_sizes` choices each
                "mlp_squashed_gaussian": they are the means of u (and log standard deviations, unless `log_std` names
                a tensor of them); the action is the middle of its bounds plus half their distance times tanh(u)
                "mlp_epsilon_greedy": the largest output is the best of n actions; with probability ε, any of them
    activation: "tanh" or "relu", applied after every layer but the last
    layers:     (weight, bias) names in the safetensors payload, in order; y = activation(W x + b), W is [out, in]
    epsilon:    the name there of a scalar e: an actor's ε is e^(1 + epsilon_exponent u), its id gives u in [0, 1)
    noise_decays: d of K processes for each number of a Box's action, z ← d z + √(1 - d²) e; e, and z at an episode's
                first step, are standard normal. The noise of u is their sum over √K; empty: white noise
    action_sizes: how many values each number of an action has, from 0 on, in C order
    convolutions: of observations that are frames, before the layers, which take the last one's output, flat in C
                order of [channels, height, width]
    channels_last: a frame is [height, width, channels], otherwise [channels, height, width]
    observation_scale: multiplies each number of a frame
    graph:      an ONNX model that gives the outputs in the layers' place, of the kinds "graph_..." that are named like
                those above: `observation` [N, *obs] to `outputs` [N, K]; its other inputs are tensors of the payload,
                by name
    action_low, action_high: the bounds of each number of an action, in C order, inclusive; empty: the action's own
    core:       "gru" or "lstm", as torch computes them. Its state is zero at an episode's first observation. A segment
                carries that before its first one, the extra "state": h of a GRU, h and then c of an LSTM, float32
    core_tensors: names of its W_x [gates, in], W_h [gates, size], b_x and b_h [gates]
    core_position: how many of `layers`, each with its activation, come before it; the others take its h
    """

    kind: str
    activation: str
    layers: tuple[tuple[str, str], ...]
    epsilon: str = ""
    epsilon_exponent: float = 0.0
    log_std: str = ""
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    action_sizes: tuple[int, ...] = ()
    convolutions: tuple[ConvolutionSpec, ...] = ()
    channels_last: bool = False
    observation_scale: float = 1.0
    graph: bytes = b""
    core: str = ""
    core_tensors: tuple[str, ...] = ()
    core_position: int = 0
    noise_decays: tuple[float, ...] = ()


class ExtraSpec(msgspec.Struct, frozen=True):
    """A further tensor of a segment, such as a recurrent state or action masks, which travels under its `name`.

    tensor: one row of it
    per:    "segment": one row, of the segment's first observation; "observation": L+1 rows, one of each
    """

    name: str
    tensor: TensorSpec
    per: str

    def count_rows(self, num_steps: int) -> int:
        """Count its rows in a segment of `num_steps`."""
        return num_steps + 1 if self.per == "observation" else 1


class SpaceSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an environment shows before it becomes flat (see `shoal.wire.spaces`).

    kind:  Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, as gymnasium names them; Part: one part of a Dict
           alone, as it is
    shape: of one observation
    sizes: how many values each number has, of a Discrete or a MultiDiscrete, from `start` on
    names: of the parts of a Dict, or of the Part
    parts: in their order; those that are not observed are left out
    """

    kind: str
    shape: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    parts: tuple[SpaceSpec, ...] = ()


class ExperienceSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The format of a run's segments. `segment_length` is the most steps in one segment.

    self_play: one agent of an environment has the newest weights, and the others have past ones
    agents:    of the environment that this policy plays, in a run of several policies; (): all
    space:     what the environment shows, where that is no `observation` yet
    """

    observation: TensorSpec
    action: TensorSpec
    segment_length: int
    policy: PolicySpec
    extras: tuple[ExtraSpec, ...] = ()
    self_play: bool = False
    agents: tuple[str, ...] = ()
    space: SpaceSpec | None = None
