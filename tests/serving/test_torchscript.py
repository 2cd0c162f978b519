"""TorchScript files: registered with a signature, and answering as their module does."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from shoal.cli.commands.models import models
from shoal.errors import ConfigError, WeightsError
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

X = np.random.default_rng(0).random((5, 3), np.float32)
TENSORS = """
inputs:
  - {name: left, datatype: FP32, shape: [-1, 3]}
  - {name: right, datatype: FP32, shape: [-1, 3]}
outputs:
  - {name: y, datatype: FP32, shape: [-1, 2]}
  - {name: label, datatype: INT64, shape: [-1]}
"""
SIGNATURE = Signature.from_yaml(TENSORS)


class Pair(nn.Module):
    """Gives a tuple, and without dropout what its layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(3, 2), nn.Dropout(0.5)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.dropout(self.linear(left - right))
        return y, y.argmax(-1)


class Named(Pair):
    """Gives a dict."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        y = self.dropout(self.linear(left - right))
        return {"label": y.argmax(-1), "y": y}


def scripted(module: nn.Module) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(module), file)  # type: ignore[no-untyped-call]
    return file.getvalue()


def predictor(**options: object) -> Predictor:
    return Predictor(
        ModelFactory(format="torchscript"), SIGNATURE, ModelOptions.parse({"max_batch_size": 8, **options})
    )


@pytest.mark.parametrize("kind", [Pair, Named])
def test_a_file_answers_as_its_module_and_versions_live_side_by_side(kind: type[Pair]) -> None:
    first, second = kind(), kind()
    subject = predictor()
    loaded = [subject.load(WeightSnapshot.from_payload(n, scripted(each))) for n, each in ((1, first), (2, second))]
    for model, module in zip(loaded, (first, second), strict=True):
        answers = model.predict_batch([{"left": X[:2], "right": X[:2] * 2}, {"right": X[2:] * 2, "left": X[2:]}])
        expected = module.linear(torch.from_numpy(-X)).detach()
        np.testing.assert_allclose(np.concatenate([each["y"] for each in answers]), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(np.concatenate([each["label"] for each in answers]), expected.argmax(-1))


def test_a_signature_that_the_file_does_not_fulfil_is_rejected_before_it_serves() -> None:
    wrong = Signature(inputs=SIGNATURE.inputs, outputs=[TensorSignature(name="y", datatype="FP32", shape=[-1, 4])])
    subject = Predictor(ModelFactory(format="torchscript"), wrong, ModelOptions(max_batch_size=2))
    with pytest.raises(WeightsError, match=r"cannot answer an example.*output 'y': expected FP32 \[1, 4\]"):
        subject.load(WeightSnapshot.from_payload(1, scripted(Pair())))


@pytest.mark.parametrize("payload", [b"nonsense", scripted(Pair())[:300]])
def test_a_file_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises(WeightsError, match=r"version 3 is not a TorchScript file .*write it with torch\.jit\.save"):
        predictor().load(WeightSnapshot.from_payload(3, payload))


@pytest.mark.parametrize(("field", "value"), [("compile", True), ("precision", "bf16")])
def test_options_that_change_the_program_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field} = .*is not for models of format torchscript"):
        predictor(**{field: value})


def add(*words: str) -> str:
    result = CliRunner().invoke(models, ["add", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_file_is_added_with_its_signature(shoal_home: Path, tmp_path: Path) -> None:
    program, tensors = tmp_path / "pair.pt", tmp_path / "tensors.yaml"
    program.write_bytes(scripted(Pair()))
    tensors.write_text(TENSORS)
    with pytest.raises(ConfigError, match=r"signature = '': .*pair\.pt has no names.*give --signature FILE"):
        add(str(program))
    told = add(str(program), "--signature", str(tensors))
    assert "pair@champion is pair@1 now" in told
    assert "It gives y: FP32 [any, 2]; label: INT64 [any]" in told
    found = Registry().get("pair")
    assert found.weight_file().path.name == "model.pt"
    subject = Predictor(found.manifest.model, found.manifest.signature, ModelOptions(max_batch_size=2))
    assert subject.load(found.snapshot()).predict_batch([{"left": X[:1], "right": X[:1]}])[0]["label"].shape == (1,)
    state = tmp_path / "state.pt"
    torch.save(Pair().state_dict(), state)
    with pytest.raises(WeightsError, match=r"state\.pt is not a TorchScript file.*a state dict is registered with"):
        add(str(state), "--signature", str(tensors))
    onnx_file = tmp_path / "pair.onnx"
    onnx_file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"signature = .*pair\.onnx, which has its own\. leave it out"):
        add(str(onnx_file), "--signature", str(tensors))
