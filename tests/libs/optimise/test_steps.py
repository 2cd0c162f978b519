"""The steps of a search alone: the graphs that they write, as endpoints compute them."""
# Models of format onnx, torch_export and torchscript are opened by shoal.libs.export.

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.libs.optimise import measure
from shoal.libs.optimise.steps import Model, apply_step
from shoal.registry import ModelFactory, Signature, TensorSignature
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot


class Scores(nn.Module):
    """kind: the form of its outputs, in an order that is not the alphabet's."""

    def __init__(self, kind: str = "tensor") -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 3), kind

    def forward(self, right: Tensor, left: Tensor) -> Any:
        scores = self.linear(right - left)
        by_kind = {"tensor": scores, "tuple": (scores, scores / 2), "dict": {"scores": scores, "half": scores / 2}}
        return by_kind[self.kind]


class Forgetful(Scores):
    def forward(self, right: Tensor, left: Tensor) -> Any:
        return self.linear(left)


class Silent(Scores):
    """Raises an error without a message where a tracer calls it."""

    def forward(self, right: Tensor, left: Tensor) -> Any:
        if torch.jit.is_tracing():
            raise NotImplementedError
        return super().forward(right, left)


def describe(*names: str, size: int) -> list[TensorSignature]:
    return [TensorSignature(name=name, datatype="FP32", shape=[-1, size]) for name in names]


INPUTS = [torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]


def export(network: nn.Module, signature: Signature, **kwargs: Any) -> Model:
    factory = ModelFactory(factory=f"{__name__}:{type(network).__name__}", kwargs=kwargs)
    payload = safetensors.torch.save(network.state_dict())
    return apply_step(Model((), factory, payload), "onnx", factory, signature, INPUTS)


@pytest.mark.parametrize(("kind", "names"), [("tensor", ["y"]), ("tuple", ["z", "y"]), ("dict", ["scores", "half"])])
def test_a_graph_gives_what_its_module_gives_by_the_names_of_the_endpoint(kind: str, names: list[str]) -> None:
    torch.manual_seed(0)
    network = Scores(kind)
    signature = Signature(inputs=describe("right", "left", size=4), outputs=describe(*names, size=3))
    model = export(network, signature, kind=kind)
    predictor = Predictor(model.factory, signature, ModelOptions())
    loaded = predictor.load(WeightSnapshot.from_payload(1, model.payload))
    (found,) = loaded.predict_batch([{"right": INPUTS[0].numpy(), "left": INPUTS[1].numpy()}])
    assert isinstance(found, dict)
    scores = network.linear(INPUTS[0] - INPUTS[1]).detach().numpy()
    np.testing.assert_allclose(found[names[0]], scores, rtol=1e-5)
    if kind != "tensor":
        np.testing.assert_allclose(found[names[1]], scores / 2, rtol=1e-5)
    example = network(*INPUTS)
    measured = measure.ServedNetwork(measure.open_forward(model, signature), signature, example)(*INPUTS)
    assert type(measured) is type(example)
    torch.testing.assert_close(measured, example, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("network", "problem"), [(Forgetful(), "takes left alone"), (Silent(), "cannot convert it: NotImplementedError")]
)
def test_a_graph_that_cannot_be_written_is_rejected_with_the_reason(network: nn.Module, problem: str) -> None:
    signature = Signature(inputs=describe("right", "left", size=4), outputs=describe("y", size=3))
    with pytest.raises(ConfigError, match=problem):
        export(network, signature)
