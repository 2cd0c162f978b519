"""The policy of a user's own network as an ONNX graph, checked before a run starts: actors compute it without torch.

Called where the format of a run's experience is described. Needs torch and onnx; weights are inputs of the graph.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
import torch
from torch import Tensor, nn

from shoal.actor.policy_networks import GraphNetwork
from shoal.errors import ConfigError, WeightsError, needs_extra
from shoal.wire.experience_spec import TensorSpec

MAX_GRAPH_BYTES = 8 * 2**20  # it travels in each welcome
TOLERANCE = 1e-3  # of onnxruntime's outputs, relative to the largest of torch's or to 1: sums in another order


def export_policy(model: nn.Module, observation: TensorSpec, num_outputs: int, reference: str) -> bytes:
    """The graph of what `model` computes for actors: `observation` [N, *obs] to `outputs` [N, num_outputs].

    Its other inputs are tensors of the model's state, under their names. Raises ConfigError for a network that does not
    keep its contract (see OwnNetwork), or that actors could not compute. MissingExtra without onnx.
    """
    others = {name: each.dtype for name, each in model.named_parameters() if each.dtype != torch.float32}
    if others:
        name, dtype = next(iter(others.items()))
        raise ConfigError("model", reference, f"its parameter {name} is {dtype}", "make it float32")
    if not any(each.requires_grad for each in model.parameters()):
        raise ConfigError("model", reference, "has no parameter to learn")
    zeros = np.zeros((3, *observation.shape), "uint8" if is_byte_tensor(observation) else "float32")
    samples = [zeros, _draw_observations(observation, zeros)]
    with torch.no_grad():
        expected = [_compute_outputs(model, each, num_outputs, reference) for each in samples]
        graph = _export(model, torch.from_numpy(samples[1]), reference)
    if len(graph) > MAX_GRAPH_BYTES:
        problem = f"its graph has {len(graph):,} bytes, at most {MAX_GRAPH_BYTES:,}"
        raise ConfigError(
            "model", reference, problem, "make its constants parameters or buffers, which travel as weights"
        )
    _compare(graph, model, samples, expected, reference)
    return graph


def is_byte_tensor(observation: TensorSpec) -> bool:
    """Whether these observations enter a network as bytes, otherwise as float32; as the learner's `to_observations`."""
    return observation.dtype == "uint8" and len(observation.shape) > 1


class _Outputs(nn.Module):
    """The outputs of a model without its values; its tensors have the model's names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._modules = model._modules
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._compute = model.forward

    def forward(self, observation: Tensor) -> Tensor:
        result = self._compute(observation)
        outputs: Tensor = result[0] if isinstance(result, tuple) else result
        return outputs


def _draw_observations(observation: TensorSpec, zeros: np.ndarray) -> np.ndarray:
    """Three observations, at random within the bounds of all their numbers."""
    random = np.random.default_rng(0)
    if zeros.dtype == np.uint8:
        return random.integers(0, 256, zeros.shape, np.uint8)
    low, high = max(observation.low or -1.0, -1e3), min(observation.high or 1.0, 1e3)
    drawn: np.ndarray = random.uniform(min(low, high), max(low, high), zeros.shape).astype(np.float32)
    return drawn


def _compute_outputs(model: nn.Module, observations: np.ndarray, num_outputs: int, reference: str) -> np.ndarray:
    """Torch's outputs, whose shape and dtype are right, as those of the value are."""
    try:
        result = model(torch.from_numpy(observations))
    except ConfigError:
        raise
    except Exception as error:  # user code may raise anything
        problem = f"forward raised {type(error).__name__} for observations {list(observations.shape)}: {error}"
        raise ConfigError("model", reference, problem) from error
    outputs, value = result if isinstance(result, tuple) else (result, None)
    wanted = {"outputs": (outputs, (len(observations), num_outputs)), "value": (value, (len(observations),))}
    for name, (each, shape) in wanted.items():
        if each is not None and (each.shape != shape or each.dtype != torch.float32):
            problem = f"for observations {list(observations.shape)} its {name} are {each.dtype} {list(each.shape)}"
            raise ConfigError("model", reference, problem, f"give float32 {list(shape)}")
        if each is not None and not each.isfinite().all():
            raise ConfigError("model", reference, f"its {name} are not finite for observations of zeros or at random")
    computed: np.ndarray = outputs.numpy()
    return computed


def _export(model: nn.Module, observations: Tensor, reference: str) -> bytes:
    with needs_extra("export"):
        import onnx  # noqa: F401 - torch's exporter needs it
    file = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter's age, and of what the comparison finds
            torch.onnx.export(
                _Outputs(model).eval(),
                (observations,),
                file,  # type: ignore[arg-type]
                dynamo=False,  # it leaves weights out; the newer exporter needs two more packages
                export_params=False,
                input_names=["observation"],
                output_names=["outputs"],
                dynamic_axes={"observation": {0: "batch"}, "outputs": {0: "batch"}},
            )
    except Exception as error:  # of the exporter, or of user code under its tracing
        problem = f"torch.onnx cannot export it: {str(error).strip().splitlines()[0]}"
        raise ConfigError("model", reference, problem, "use operations that ONNX has") from error
    return file.getvalue()


def _compare(
    graph: bytes, model: nn.Module, samples: list[np.ndarray], expected: list[np.ndarray], reference: str
) -> None:
    """Raise ConfigError unless onnxruntime computes what torch does, for three observations and for one."""
    tensors = {name: each.detach().numpy() for name, each in model.state_dict().items()}
    try:
        network = GraphNetwork(graph)
        network.load(1, tensors)
        for observations, outputs in zip(samples, expected, strict=True):
            for rows in (slice(None), slice(1)):
                result = network.compute(observations[rows])
                error = float(np.abs(result - outputs[rows]).max()) if result.shape == outputs[rows].shape else np.inf
                if not error <= TOLERANCE * max(1.0, float(np.abs(outputs).max())):
                    problem = f"onnxruntime's outputs differ from torch's by up to {error:g}"
                    remedy = "neither branch on values or on the batch's size, nor draw random numbers, in forward"
                    raise ConfigError("model", reference, problem, remedy)
    except WeightsError as error:
        raise ConfigError("model", reference, f"its graph does not take its own weights: {error}") from error
    except ConfigError as error:
        raise ConfigError("model", reference, error.problem, error.remedy) from error
    except Exception as error:  # onnxruntime's errors have no common base
        raise ConfigError("model", reference, f"onnxruntime cannot compute its graph: {error}") from error
