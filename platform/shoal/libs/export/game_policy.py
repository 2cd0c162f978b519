"""A policy as data that a runtime in any language computes from: policy.json, and the test vectors of it.

Called by `export_model`. The vectors are what the registered model answers, in torch; the policy's outputs are compared
with them in NumPy before they are written. Legend: A numbers of an action, K choices, S size of a state.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from shoal.errors import ConfigError
from shoal.extend.registry import ModelVersion
from shoal.extend.rl import make_policy
from shoal.libs.export.examples import Example, Predict
from shoal.libs.export.runtime.model import measure_difference
from shoal.weights import decode_tensors
from shoal.wire.action_masks import INFO_KEY
from shoal.wire.experience_spec import EXPERIENCE_FILE, ExperienceSpec, PolicySpec, SpaceSpec, TensorSpec

FORMAT = 1
NUM_VECTORS = 8
FIRST_OF_EPISODES = (0, 5)
MAX_SPAN = 1e3  # of observations that are drawn between their bounds
MASKED = -1e9  # the output of a choice that is not allowed, as of the models
MAX_DRAWS = 64
LEAST_MARGIN = 1e-3  # of the best output over the next, relative to the largest or 1: rounding must not choose
GREEDY = "epsilon_greedy"
KINDS = ("categorical", "multi_categorical", GREEDY, "squashed_gaussian")


class GameLayer(msgspec.Struct):
    """y = activation(W x + b), or a step of a recurrent core, whose further tensors are of its state.

    layer:      linear, gru or lstm, with the gates in torch's order
    activation: tanh, relu or ""
    Tensors are base64 of float32, little-endian, in C order: weight [inputs, outputs], bias [outputs]
    """

    layer: str
    activation: str
    weight: str
    bias: str
    weight_h: str = ""
    bias_h: str = ""


class GamePolicy(msgspec.Struct):
    """The content of policy.json. A runtime may search its text: the first `"KEY":` is that field, within a layer too.

    unsupported: why the runtimes cannot compute it, and policy.onnx alone can; "" otherwise
    kind:        categorical, multi_categorical, epsilon_greedy or squashed_gaussian: what the last layer's outputs are
    action:      best or sampled: how the runtimes act at first
    space:       what the game showed, where that became a flat observation
    action_sizes: how many values each number of an action has; action_low, action_high: or its bounds
    mask_size:   choices of a mask that `act` takes; 0: it takes none
    """

    name: str
    version: int
    unsupported: str
    kind: str
    action: str
    observation: TensorSpec
    observation_size: int
    action_shape: list[int]
    action_sizes: list[int]
    action_low: list[float]
    action_high: list[float]
    mask_size: int
    state_size: int
    layers: list[GameLayer] = []
    space: SpaceSpec | None = None
    format: int = FORMAT
    target: str = "game"


def read_experience(version: ModelVersion) -> ExperienceSpec:
    """The format of experience with which a policy was registered. Raises ConfigError for what no game can compute."""
    manifest = version.manifest
    outputs = [each.name for each in manifest.signature.outputs]
    if "action" not in outputs or "observation" not in [each.name for each in manifest.signature.inputs]:
        problem, remedy = f"is no policy: its outputs are {', '.join(outputs)}", "--to container exports any model"
        raise ConfigError("model", version.ref, problem, remedy)
    if EXPERIENCE_FILE not in manifest.files:
        parent, problem = manifest.lineage.get("parent"), "was registered without the format of its experience"
        remedy = f'shoal.load("{version.ref}").onnx(FILE, opset=15) writes the network alone'
        raise ConfigError("model", version.ref, problem, f"export {parent}, its parent" if parent else remedy)
    stored = version.fetch_file(EXPERIENCE_FILE).read_bytes()
    experience = msgspec.json.decode(stored, type=ExperienceSpec)
    if not experience.policy.kind:
        problem = "is a mixture, of which a member is drawn for each episode: neither ONNX nor the runtimes do that"
        raise ConfigError("model", version.ref, problem, "export what a run with action=best or sampled registers")
    return experience


def describe_policy(version: ModelVersion, experience: ExperienceSpec, action_default: str | None) -> GamePolicy:
    """The policy, without layers where the runtimes cannot compute them."""
    inputs = {each.name: each.shape for each in version.manifest.signature.inputs}
    policy, action = experience.policy, experience.action
    kind, unsupported = policy.kind.partition("_")[2], ""
    if policy.graph or policy.convolutions or kind not in KINDS:
        unsupported = "it has convolutions" if policy.convolutions else f"it is of the kind {kind}"
        unsupported = "it has a network of your own" if policy.graph else unsupported
    described = GamePolicy(
        name=version.name,
        version=version.version,
        unsupported=unsupported,
        kind=kind,
        action=action_default or version.manifest.model.action,
        observation=experience.observation,
        observation_size=math.prod(experience.observation.shape),
        action_shape=list(action.shape),
        action_sizes=[] if policy.action_low else list(policy.action_sizes or (int(action.high or 0) + 1,)),
        action_low=list(policy.action_low),
        action_high=list(policy.action_high),
        mask_size=inputs[INFO_KEY][1] if INFO_KEY in inputs else 0,
        state_size=inputs["state"][1] if "state" in inputs else 0,
        space=experience.space,
    )
    if not unsupported:
        described.layers = _list_layers(policy, read_tensors(version, policy))
    return described


def read_tensors(version: ModelVersion, policy: PolicySpec) -> dict[str, np.ndarray]:
    """Its tensors, whose last layer gives all outputs: of action values Q(s, a) - mean of Q(s, .), which the stream of
    advantages gives, too; of a Box means and log_stds, also where those are parameters."""
    tensors = decode_tensors(version.snapshot().payload)
    weight, bias = policy.layers[-1]
    if policy.epsilon:
        scale = tensors["value_scale"]
        tensors |= {name: scale * (tensors[name] - tensors[name].mean(0)) for name in (weight, bias)}
    if policy.log_std:
        tensors[weight] = np.concatenate([tensors[weight], np.zeros_like(tensors[weight])])
        tensors[bias] = np.concatenate([tensors[bias], tensors[policy.log_std]])
    return tensors


def _list_layers(policy: PolicySpec, tensors: Mapping[str, np.ndarray]) -> list[GameLayer]:
    layers = [
        GameLayer("linear", policy.activation, _encode(tensors[weight]), _encode(tensors[bias]))
        for weight, bias in policy.layers
    ]
    layers[-1].activation = ""
    if policy.core:
        weight_x, weight_h, bias_x, bias_h = (_encode(tensors[name]) for name in policy.core_tensors)
        layers.insert(policy.core_position, GameLayer(policy.core, "", weight_x, bias_x, weight_h, bias_h))
    return layers


def _encode(tensor: np.ndarray) -> str:
    return base64.b64encode(tensor.T.astype("<f4").tobytes()).decode()


# -- test vectors -----------------------------------------------------------------------------------------------------


def make_vectors(policy: GamePolicy, registered: Predict) -> list[dict[str, Any]]:
    """What the registered model answers at observations of two episodes, by name:

    reset:               whether an episode begins, from the state of zeros
    observation:         numbers, flat
    mask:                bool [K], or []
    state, next_state:   [S] before and after
    outputs:             float32: of choices [K], those that are forbidden -1e9; of numbers [2A], the means and log_stds
    action, sampled:     the numbers of the best action, and of the one that is drawn with `uniforms`: one of each
                         choice, two of each number
    """
    generator = np.random.default_rng(0)
    vectors: list[dict[str, Any]] = []
    state = np.zeros(policy.state_size, np.float32)
    for _ in range(MAX_DRAWS):
        is_first = len(vectors) in FIRST_OF_EPISODES
        state = np.zeros_like(state) if is_first else state
        vector = _make_vector(policy, registered, generator, state)
        if vector is None:
            continue
        vectors.append({"reset": is_first, **vector})
        state = np.array(vector["next_state"], np.float32)
        if len(vectors) == NUM_VECTORS:
            break
    return vectors


def _make_vector(
    policy: GamePolicy, registered: Predict, generator: np.random.Generator, state: np.ndarray
) -> dict[str, Any] | None:
    """None where two choices are as good, so that rounding would decide."""
    observation = _draw_observation(policy.observation, generator)
    mask = _draw_mask(policy.action_sizes, generator) if policy.mask_size else None
    inputs = {"observation": observation[None]} | ({"state": state[None]} if policy.state_size else {})
    masks = [{INFO_KEY: each[None]} for each in (np.ones_like(mask), mask)] if mask is not None else [{}, {}]
    answer, masked = (registered(Example({**inputs, **each}, 1, b"")) for each in masks)
    answer = {name: each[0] for name, each in answer.items()}
    best = masked["action"].ravel()
    if policy.action_low:
        outputs = np.concatenate([answer["mean"], answer["log_std"]])
        uniforms = generator.random(2 * best.size)
        sampled = _sample_numbers(policy, outputs, uniforms)
    else:
        outputs = answer["q_values"] - answer["q_values"].mean() if "q_values" in answer else answer["logits"]
        margin = LEAST_MARGIN * max(1.0, float(np.abs(outputs).max()))
        outputs = outputs if mask is None else np.where(mask, outputs, np.float32(MASKED))
        uniforms = generator.random(outputs.size)
        noise = -np.log(-np.log(uniforms)) * (policy.kind != GREEDY)  # of Gumbel: the argmax with it is a sample
        scores = [np.split(each, np.cumsum(policy.action_sizes)[:-1]) for each in (outputs, outputs + noise)]
        if any(each.size > 1 and np.diff(np.sort(each)[-2:]) < margin for each in (*scores[0], *scores[1])):
            return None
        sampled = np.array([each.argmax() for each in scores[1]])
    return {
        "observation": observation.ravel().tolist(),
        "mask": [] if mask is None else mask.tolist(),
        "state": state.tolist(),
        "outputs": outputs.tolist(),
        "next_state": answer["next_state"].tolist() if policy.state_size else [],
        "action": best.tolist(),
        "uniforms": uniforms.tolist(),
        "sampled": sampled.tolist(),
    }


def _draw_observation(spec: TensorSpec, generator: np.random.Generator) -> np.ndarray:
    """float32 within its bounds, or about zero."""
    if spec.low is None or spec.high is None or spec.high - spec.low > MAX_SPAN:
        drawn = np.clip(generator.standard_normal(spec.shape), spec.low, spec.high)
    else:
        drawn = generator.uniform(spec.low, spec.high, spec.shape)
    return (np.round(drawn) if spec.numpy_dtype().kind in "biu" else drawn).astype(np.float32)


def _draw_mask(choices: list[int], generator: np.random.Generator) -> np.ndarray:
    """bool [K], which allows each number of an action a choice."""
    parts = [generator.random(size) < 0.5 for size in choices]
    for each in parts:
        each[generator.integers(each.size)] = True
    return np.concatenate(parts)


def _sample_numbers(policy: GamePolicy, outputs: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """low ... high, by tanh of a Gaussian u. Box and Muller (1958) make its noise of two uniform numbers."""
    means, log_stds = outputs.astype(np.float64).reshape(2, -1)
    noise = np.sqrt(-2 * np.log(1 - uniforms[::2])) * np.cos(2 * np.pi * uniforms[1::2])
    low, high = np.array(policy.action_low), np.array(policy.action_high)
    actions: np.ndarray = (low + high) / 2 + (high - low) / 2 * np.tanh(means + np.exp(log_stds) * noise)
    return actions


def compare_vectors(
    experience: ExperienceSpec, version: ModelVersion, vectors: list[dict[str, Any]], tolerance: float
) -> float:
    """The largest difference of the vectors' outputs from those that actors compute in NumPy with the same tensors.

    Raises ConfigError beyond the tolerance.
    """
    spec = msgspec.structs.replace(experience.policy, log_std="")
    policy = make_policy(spec, action_shape=experience.action.shape)
    policy.load(version.version, read_tensors(version, experience.policy))
    largest, num_means = 0.0, len(experience.policy.action_low) or None
    for vector in vectors:
        if vector["reset"]:
            policy.reset()
        found = policy.compute_outputs(np.array([vector["observation"]], np.float32), [0])[:, :num_means]
        wanted = np.array([vector["outputs"][:num_means]], np.float32)
        wanted, found = (np.where(wanted == MASKED, np.float32(0), each) for each in (wanted, found))
        largest = max(largest, measure_difference({"outputs": wanted}, {"outputs": found}))
    if not largest <= tolerance:
        problem = f"policy.json's outputs differ by {largest:g} from the registered model's"
        raise ConfigError("tolerance", tolerance, problem, "set a larger tolerance")
    return largest
