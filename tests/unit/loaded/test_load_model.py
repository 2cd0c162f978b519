"""`shoal.load` of any model: outputs, rows, the network, ONNX by shoal.libs.export, and references."""

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pandas
import pytest
import torch

import shoal
import shoal.runs
from shoal.errors import ConfigError, DataError, InferenceError, RegistryError
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot

X = torch.linspace(-1, 1, 6)[:, None].expand(6, 3).contiguous()
Arrays = dict[str, np.ndarray]


def make_linear(num_inputs: int) -> torch.nn.Module:
    return torch.nn.Linear(num_inputs, 2)


def make_doubling(num_inputs: int) -> Callable[[Arrays], Arrays]:
    def double(arrays: Arrays) -> Arrays:
        if np.abs(arrays["input"]).max() > 10:
            raise ValueError("input: beyond 10")
        return {"input": 2 * arrays["input"]}

    return double


def make_sums(num_inputs: int) -> Callable[[Arrays], Arrays]:
    """Of a number and the length of a word; a gap counts as 100."""

    def add_up(inputs: Arrays) -> Arrays:
        lengths = np.array([len(each) for each in inputs["word"]], np.float64)
        return {"input": (np.nan_to_num(inputs["number"], nan=100.0) + lengths)[:, None].astype(np.float32)}

    return add_up


def register(name: str, num_inputs: int, preprocess: str = "", inputs: list[TensorSignature] | None = None) -> str:
    weight = np.arange(1, 1 + 2 * num_inputs, dtype=np.float32).reshape(2, num_inputs)
    weights = WeightSnapshot.of(1, {"weight": weight, "bias": np.array([0, 1], np.float32)})
    hook = f"{__name__}:{preprocess}" if preprocess else ""
    factory = ModelFactory(factory=f"{__name__}:make_linear", kwargs={"num_inputs": num_inputs}, preprocess=hook)
    signature = Signature(
        inputs=inputs or [TensorSignature(name="input", datatype="FP32", shape=[-1, num_inputs])],
        outputs=[TensorSignature(name="sum", datatype="FP32", shape=[-1, 2], columns=["a", "b"])],
    )
    return Registry().register(name, weights, model=factory, signature=signature).ref


def test_a_model_answers_as_its_network_does_and_becomes_onnx(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    model, rows = shoal.load(register("three", 3)), X.numpy()
    with torch.inference_mode():
        wanted = model.model(X).numpy()
    for inputs in (rows, {"input": rows}, rows.tolist()):
        np.testing.assert_allclose(model.predict(inputs)["sum"], wanted, rtol=1e-5)
    assert (model.name, model.version, torch.get_num_threads()) == ("three", 1, before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporter
        file = model.onnx(tmp_path / "three.onnx")
    (answer,) = onnxruntime.InferenceSession(file).run(None, {"input": rows})
    np.testing.assert_allclose(answer, wanted, rtol=1e-4, atol=1e-6)
    with pytest.raises(ConfigError, match="is no policy: its outputs are sum"):
        model.act(rows)
    for odd, words in (
        (np.zeros((2, 4), np.float32), r"input.*is \[2, 4\].*FP32 \[-1, 3\]"),
        (np.zeros(3, np.float32), r"is \[3\]"),
        ({"other": np.zeros((1, 3))}, "no such input"),
        ({}, "is missing"),
    ):
        with pytest.raises(ConfigError, match=words):
            model.predict(odd)


def test_the_registered_preprocess_applies_and_its_refusal_is_raised(tmp_path: Path) -> None:
    model, rows = shoal.load(register("doubled", 3, "make_doubling")), X.numpy()
    with torch.inference_mode():
        np.testing.assert_allclose(model.predict(rows)["sum"], model.model(2 * X).numpy(), rtol=1e-5)
    with pytest.raises(InferenceError, match="beyond 10"):
        model.predict(100 * rows)
    with pytest.raises(ConfigError, match="has the preprocess"):
        model.onnx(tmp_path / "doubled.onnx")


def test_rows_as_they_are_become_columns_and_answers_become_rows() -> None:
    types = {"number": "FP64", "word": "BYTES"}
    columns = [TensorSignature(name=kind, datatype=types[kind], shape=[-1], kind=kind) for kind in types]
    model = shoal.load(register("sums", 1, "make_sums", columns))
    assert model.predict({"number": np.float64(2), "word": "abc"}) == {"sum": {"a": 5.0, "b": 11.0}}
    rows = [{"number": None, "word": "x"}, {"number": float("nan"), "word": None}]
    assert [each["sum"]["a"] for each in model.predict(rows)] == [101.0, 100.0]
    assert model.predict(pandas.DataFrame(rows).assign(more=1)) == model.predict(rows)
    assert model.predict([]) == model.predict(pandas.DataFrame(rows)[:0]) == []
    frame = pandas.DataFrame({"number": [1]})
    assert model.predict([{**rows[0], "more": 1}]) == model.predict(rows[:1])
    for odd, field in (({}, "number"), ({"number": 1}, "word"), (frame, "word")):
        with pytest.raises(DataError) as raised:
            model.predict(odd)
        assert raised.value.field == field
    with pytest.raises(ConfigError, match="has 2 inputs"):
        model.predict(np.ones(2))
    np.testing.assert_array_equal(model.predict({"number": np.ones(2), "word": ["ab", "c"]})["sum"][:, 0], [3, 2])


def test_references_are_names_versions_and_runs() -> None:
    register("three", 3)
    with shoal.runs.create("train", "{}") as run, shoal.runs.create("train", "{}") as other:
        run.record_model("three", 1, ())
    assert shoal.load(run.id).version == 1
    with pytest.raises(ConfigError, match="has registered no model"):
        shoal.load(other.id)
    with pytest.raises(RegistryError, match="did you mean 'three'"):
        shoal.load("thre")
    with pytest.raises(RegistryError, match="has no '7'"):
        shoal.load("three@7")
