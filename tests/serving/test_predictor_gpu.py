"""What only a CUDA device can show: graphs that are replayed for new weights, and the choice of the device."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
import torch
from torch import nn

from shoal.registry import ModelFactory, Signature, TensorSignature
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KWARGS = {"num_features": 6, "num_outputs": 3, "hidden": [32]}


def predictor(**options: object) -> Predictor:
    signature = Signature(
        inputs=[TensorSignature(name="x", datatype="FP32", shape=[-1, 6])],
        outputs=[TensorSignature(name="y", datatype="FP32", shape=[-1, 3])],
    )
    factory = ModelFactory(factory="shoal.models.perceptron:Perceptron", kwargs=KWARGS)
    return Predictor(factory, signature, ModelOptions.parse({"max_batch_size": 8, **options}))


def made(version: int) -> tuple[nn.Module, WeightSnapshot]:
    from shoal.models.perceptron import Perceptron

    torch.manual_seed(version)
    module = Perceptron(6, 3, hidden=[32]).eval()
    return module, WeightSnapshot.of(version, {name: value.numpy() for name, value in module.state_dict().items()})


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"cuda_graphs": True}, {"device": "cuda", "compile": True}])
def test_versions_live_side_by_side_on_the_device(options: dict[str, object]) -> None:
    subject = predictor(**options)
    loaded = [(module, subject.load(snapshot)) for module, snapshot in map(made, (1, 2, 3))]
    for rows in (1, 2, 3, 5, 8):
        x = np.random.default_rng(rows).standard_normal((rows, 6), np.float32)
        for module, model in loaded:
            expected = module(torch.from_numpy(x)).detach()
            np.testing.assert_allclose(model.predict_batch([{"x": x}])[0]["y"], expected, rtol=1e-3, atol=1e-4)


def test_graphs_are_captured_once_for_versions_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.serve.model.formats import cuda_graphs

    sizes = []
    original = cuda_graphs.capture_graph
    monkeypatch.setattr(cuda_graphs, "capture_graph", lambda *of: sizes.append(1) or original(*of))
    subject = predictor(cuda_graphs=True)
    x = np.ones((4, 6), np.float32)
    for version in range(1, 7):  # each is dropped when the next has been loaded, as a live model's are
        module, snapshot = made(version)
        model = subject.load(snapshot)
        gc.collect()
        expected = module(torch.ones(4, 6)).detach()
        np.testing.assert_allclose(model.predict_batch([{"x": x}])[0]["y"], expected, rtol=1e-3, atol=1e-4)
    assert len(sizes) <= 2 * 4  # two slots, of batches of 1, 2, 4 and 8


def test_auto_measures_and_says_what_is_faster(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    subject = predictor()
    module, snapshot = made(1)
    (answer,) = subject.load(snapshot).predict_batch([{"x": np.ones((1, 6), np.float32)}])
    np.testing.assert_allclose(answer["y"], module(torch.ones(1, 6)).detach(), rtol=1e-3, atol=1e-4)
    assert " is the fastest: cpu " in caplog.text
