"""Models, versions and predictors for tests of serving on a device."""

import io
import os
import shutil
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.models.lenet import LeNet
from shoal.models.perceptron import Perceptron
from shoal.registry import ModelFactory, Signature, TensorSignature
from shoal.serve.model.predictor import LoadedModel, Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of processes takes longer to start than it saves
MAX_ROWS = 8
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# The compiler of kernels builds a launcher in C.
can_compile = torch.cuda.is_available() and (
    any(map(shutil.which, ("gcc", "cc", "clang"))) and (Path(sysconfig.get_path("include")) / "Python.h").exists()
)
needs_compiler = pytest.mark.skipif(not can_compile, reason="needs a CUDA device, a C compiler and Python.h")

PERCEPTRON = ModelFactory(
    factory="shoal.models.perceptron:Perceptron", kwargs={"num_features": 6, "num_outputs": 3, "hidden": [64, 64]}
)
LENET = ModelFactory(factory="shoal.models.lenet:LeNet", kwargs={})
ROWS = {"perceptron": [6], "lenet": [1, 28, 28]}
OUTPUTS = {"perceptron": 3, "lenet": 10}
# float32 in another order; a convolution on a CUDA device rounds its factors to 10 bits.
TOLERANCES = {"perceptron": {"rtol": 1e-4, "atol": 1e-5}, "lenet": {"rtol": 1e-2, "atol": 5e-3}}


class Times(nn.Module):
    """y = x * weight: with constant weights, one number tells the version of each element."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def make_module(name: str, version: int = 1) -> nn.Module:
    """The same of a version in every thread: its numbers are drawn from a generator of its own."""
    module = (Perceptron(6, 3, hidden=[64, 64]) if name == "perceptron" else LeNet()).eval()
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = max(1, parameter[0].numel()) ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module.requires_grad_(False)


def make_signature(row: list[int], output: list[int], datatype: str = "FP32") -> Signature:
    return Signature(
        inputs=[TensorSignature(name="x", datatype=datatype, shape=[-1, *row])],
        outputs=[TensorSignature(name="y", datatype=datatype, shape=[-1, *output])],
    )


def make_predictor(name: str, kind: str = "module", **options: Any) -> Predictor:
    factory = {"perceptron": PERCEPTRON, "lenet": LENET}[name] if kind == "module" else ModelFactory(format=kind)
    parsed = ModelOptions.parse({"max_batch_size": MAX_ROWS, **options})
    return Predictor(factory, make_signature(ROWS[name], [OUTPUTS[name]]), parsed)


def make_times(size: int, **options: Any) -> Predictor:
    factory = ModelFactory(factory=f"{__name__}:Times", kwargs={"size": size})
    parsed = ModelOptions.parse({"max_batch_size": MAX_ROWS, **options})
    return Predictor(factory, make_signature([size], [size]), parsed)


def make_times_version(version: int, size: int) -> WeightSnapshot:
    return WeightSnapshot.of(version, {"weight": np.full(size, version, np.float32)})


def make_version(name: str, version: int, kind: str = "module") -> WeightSnapshot:
    module = make_module(name, version)
    if kind == "module":
        return WeightSnapshot.of(version, {key: value.numpy() for key, value in module.state_dict().items()})
    file, example = io.BytesIO(), torch.rand(4, *ROWS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if kind == "torchscript":
            torch.jit.save(torch.jit.trace(module, example), file)  # type: ignore[no-untyped-call]
        else:
            batch = torch.export.Dim("batch", min=1, max=1024)
            torch.export.save(torch.export.export(module, (example,), dynamic_shapes=({0: batch},)), file)
    return WeightSnapshot.from_payload(version, file.getvalue())


def make_rows(name: str, num_rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([num_rows, seed]).standard_normal((num_rows, *ROWS[name])).astype(np.float32)


def compute_expected(module: nn.Module, rows: np.ndarray) -> np.ndarray:
    """On the CPU, in float64."""
    with torch.no_grad():
        result: np.ndarray = module.double()(torch.from_numpy(rows).double()).numpy()
    return result


def answer(model: LoadedModel, rows: np.ndarray) -> np.ndarray:
    (found,) = model.predict_batch([{"x": rows}])
    return found["y"]
