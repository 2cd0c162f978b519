"""`shoal.load` of any model: outputs, the network, ONNX, and references."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import shoal
import shoal.runs
from shoal.errors import ConfigError, InferenceError, RegistryError

X = torch.linspace(-1, 1, 32)[:, None].expand(32, 3).contiguous()


class Halves(shoal.Task):
    """Its requests are doubled before the network, and its answers are named after it."""

    def __init__(self, *, hooks: bool = False) -> None:
        self.preprocess = self._double if hooks else None  # type: ignore[assignment]

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 2)

    def data(self) -> shoal.Data:
        return shoal.Data(train=TensorDataset(X, X[:, :2]))

    def loss(self, outputs: Any, batch: Any) -> Any:
        return ((outputs - batch[1]) ** 2).mean()

    def _double(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if np.abs(arrays["input"]).max() > 10:
            raise ValueError("input: beyond 10")
        return {"input": 2 * arrays["input"]}


def train(**args: Any) -> str:
    return shoal.fit(Halves, stop={"steps": 2}, batch_size=32, name="halves", args=args, say=None).run_id


def test_a_model_answers_as_its_network_does_and_becomes_onnx(tmp_path: Path) -> None:
    import onnxruntime

    run_id = train()
    model, rows = shoal.load("halves@champion"), X.numpy()
    (name,) = (each.name for each in model.signature.outputs)
    with torch.inference_mode():
        wanted = model.model(X).numpy()
    for inputs in (rows, {"input": rows}, rows.tolist()):
        np.testing.assert_allclose(model.predict(inputs)[name], wanted, rtol=1e-5)
    assert (model.name, model.version) == ("halves", 1)
    assert shoal.load(run_id).version == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporter
        file = model.onnx(tmp_path / "halves.onnx")
    (answer,) = onnxruntime.InferenceSession(file).run(None, {"input": rows})
    np.testing.assert_allclose(answer, wanted, rtol=1e-4, atol=1e-6)
    with pytest.raises(ConfigError, match="is no policy: its outputs are"):
        model.act(rows)


def test_the_registered_preprocess_applies_and_its_refusal_is_raised(tmp_path: Path) -> None:
    train(hooks=True)
    model, rows = shoal.load("halves"), X.numpy()
    (answer,) = model.predict(rows).values()
    with torch.inference_mode():
        np.testing.assert_allclose(answer, model.model(2 * X).numpy(), rtol=1e-5)
    with pytest.raises(InferenceError, match="beyond 10"):
        model.predict(100 * rows)
    with pytest.raises(ConfigError, match="has the preprocess"):
        model.onnx(tmp_path / "halves.onnx")


def test_loading_does_not_change_the_threads_of_the_program() -> None:
    train()
    before = torch.get_num_threads()
    shoal.load("halves").predict(X.numpy())
    assert torch.get_num_threads() == before


def test_what_is_not_there_is_said() -> None:
    train()
    with pytest.raises(RegistryError, match="halves"):
        shoal.load("halvs")
    with pytest.raises(RegistryError, match="has no '7'"):
        shoal.load("halves@7")
    run_id = shoal.fit(Halves, stop={"steps": 1}, batch_size=32, register=False, say=None).run_id
    with pytest.raises(ConfigError, match="has registered no model"):
        shoal.load(run_id)
