"""Files of torch.export, ONNX and TorchScript: their signature is read or given, and they answer as their module."""

import functools
import io
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from refusals import refused
from registered import tensors
from shoal.errors import ConfigError, WeightsError
from shoal.libs.export.formats import exported
from shoal.libs.export.formats import onnx as onnx_format
from shoal.registry import ModelFactory, Registry, Signature
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot
from typed import complaint, said

BATCH = torch.export.Dim("batch", min=1, max=1024)
X = np.random.default_rng(0).random((5, 3), np.float32)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(left + right)
        return y, y.argmax(-1)


class Named(TwoInputs):
    """Gives a dict of what TwoInputs gives, under `keys`; nested in another one, where there is one key alone."""

    def __init__(self, *keys: str) -> None:
        super().__init__()
        self.keys = keys

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, object]:  # type: ignore[override]
        pair = super().forward(left, right)
        if len(self.keys) == 1:
            return {self.keys[0]: {"y": pair[0], "label": pair[1]}}
        return dict(zip(self.keys, pair, strict=True))


class Among(nn.Module):
    """Takes a number and None among its tensors, and gives others."""

    def forward(self, left: torch.Tensor, scale: int, none: None, right: torch.Tensor) -> object:
        return {"sum": scale * left + right, "size": 3, "nothing": none, "product": left * right}


class Attention(nn.Module):
    """Gives its output, and None where its weights would be."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        y, weights = self.attention(x[:, None], x[:, None], x[:, None], need_weights=False)
        return y[:, 0], weights


def exported_payload(module: nn.Module, dynamic: bool = True) -> bytes:
    example = tuple(torch.rand(4, 3) for _ in range(2))
    shapes = {"left": {0: BATCH}, "right": {0: BATCH}} if dynamic else None
    file = io.BytesIO()
    torch.export.save(torch.export.export(module.eval(), example, dynamic_shapes=shapes), file)
    return file.getvalue()


def onnx_payload(scale: float = 2.0, batch: int | str = "batch") -> bytes:
    """y = scale * x."""
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "scale"], ["y"])],
        "scaled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 3])],
        [numpy_helper.from_array(np.array([scale], np.float32), "scale")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


class Scripted(TwoInputs):
    """Gives a tuple in another order than the signature where it gives a dict; without dropout what its layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        y = self.dropout(self.linear(left + right))
        return {"output_1": y.argmax(-1), "output_0": y}


def scripted_payload(module: nn.Module) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(module), file)  # type: ignore[no-untyped-call]
    return file.getvalue()


TENSORS = """
inputs:
  - {name: left, datatype: FP32, shape: [-1, 3]}
  - {name: right, datatype: FP32, shape: [-1, 3]}
outputs:
  - {name: output_0, datatype: FP32, shape: [-1, 2]}
  - {name: output_1, datatype: INT64, shape: [-1]}
"""
SIGNATURE = Signature.from_yaml(TENSORS)


def predictor(kind: str, signature: Signature, **options: object) -> Predictor:
    return Predictor(ModelFactory(format=kind), signature, ModelOptions.parse({"max_batch_size": 8, **options}))


def test_an_exported_program_has_its_signature() -> None:
    assert exported.read_signature(exported_payload(TwoInputs()), "file") == SIGNATURE


@pytest.mark.parametrize(
    ("kind", "module", "save"),
    [
        ("torch_export", TwoInputs, exported_payload),
        ("torchscript", TwoInputs, scripted_payload),
        ("torchscript", Scripted, scripted_payload),
    ],
)
def test_a_file_answers_as_its_module_and_versions_live_side_by_side(
    kind: str, module: type[TwoInputs], save: Callable[[nn.Module], bytes]
) -> None:
    subject, modules = predictor(kind, SIGNATURE), {7: module(), 8: module()}
    loaded = [subject.load(WeightSnapshot.from_payload(version, save(each))) for version, each in modules.items()]
    for model, each in zip(loaded, modules.values(), strict=True):
        answers = model.predict_batch([{"right": X[:2], "left": X[:2] * 2}, {"right": X[2:], "left": X[2:] * 2}])
        expected = each.linear(torch.from_numpy(X) * 3).detach()
        np.testing.assert_allclose(np.concatenate([answer["output_0"] for answer in answers]), expected, rtol=1e-4)
        np.testing.assert_array_equal(np.concatenate([answer["output_1"] for answer in answers]), expected.argmax(-1))
    assert [model.version for model in loaded] == [7, 8]


def split_row(**_: object) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """A step that makes the inputs of TwoInputs, by other names and shapes, from one input."""
    return lambda arrays: {"a": arrays["row"][:, :3], "b": arrays["row"][:, 3:].astype(np.float32)}


@pytest.mark.parametrize("save", [exported_payload, scripted_payload])
def test_a_step_before_a_file_may_make_other_inputs_of_a_request(save: Callable[[nn.Module], bytes]) -> None:
    module = TwoInputs()
    request = tensors(row=[-1, 6])
    kind = "torch_export" if save is exported_payload else "torchscript"
    factory = ModelFactory(format=kind, preprocess=f"{__name__}:split_row")
    signature = Signature(inputs=request, outputs=SIGNATURE.outputs)
    subject = Predictor(factory, signature, ModelOptions(max_batch_size=4))
    loaded = subject.load(WeightSnapshot.from_payload(1, save(module)))
    [answer] = loaded.predict_batch([{"row": np.concatenate([X, X * 2], 1)}])
    np.testing.assert_allclose(answer["output_0"], module.linear(torch.from_numpy(X) * 3).detach(), rtol=1e-4)


def test_a_signature_that_a_file_does_not_fulfil_is_rejected_before_it_serves() -> None:
    outputs = [SIGNATURE.outputs[0].model_copy(update={"shape": [-1, 4]})]
    wrong = Signature(inputs=SIGNATURE.inputs, outputs=outputs)
    with pytest.raises(WeightsError, match=r"cannot answer an example.*output 'output_0': expected FP32 \[1, 4\]"):
        predictor("torchscript", wrong).load(WeightSnapshot.from_payload(1, scripted_payload(TwoInputs())))


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["picked", "logits"], ["picked", "logits"]),
        (["a b", "1"], ["output_0", "output_1"]),
        (["nested"], ["output_0", "output_1"]),
    ],
)
def test_outputs_have_the_keys_of_the_dict_that_a_program_gives(keys: list[str], names: list[str]) -> None:
    module = Named(*keys)
    payload = exported_payload(module)
    signature = exported.read_signature(payload, "file")
    assert [(each.name, each.shape) for each in signature.outputs] == [(names[0], [-1, 2]), (names[1], [-1])]
    model = predictor("torch_export", signature).load(WeightSnapshot.from_payload(7, payload))
    (answer,) = model.predict_batch([{"left": X, "right": X}])
    y, label = TwoInputs.forward(module, torch.from_numpy(X), torch.from_numpy(X))
    np.testing.assert_allclose(answer[names[0]], y.detach(), rtol=1e-5)
    np.testing.assert_array_equal(answer[names[1]], label)


def saved(module: nn.Module, *arguments: object, dynamic_shapes: object) -> bytes:
    file = io.BytesIO()
    torch.export.save(torch.export.export(module.eval(), arguments, dynamic_shapes=dynamic_shapes), file)
    return file.getvalue()


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_no_tensor_is_neither_input_nor_output(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without C++, which takes half a minute; `test_predictor_options` compiles with it.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    left, right = torch.rand(4, 3), torch.rand(4, 3)
    payload = saved(Among(), left, 2, None, right, dynamic_shapes=({0: BATCH}, None, None, {0: BATCH}))
    signature = exported.read_signature(payload, "file")
    assert [each.name for each in signature.inputs] == ["left", "right"]
    assert [each.name for each in signature.outputs] == ["sum", "product"]
    model = predictor("torch_export", signature, compile=compiled).load(WeightSnapshot.from_payload(1, payload))
    (answer,) = model.predict_batch([{"left": X, "right": X + 1}])
    np.testing.assert_allclose(answer["sum"], 3 * X + 1, rtol=1e-6)
    np.testing.assert_allclose(answer["product"], X * (X + 1), rtol=1e-6)


def test_a_tensor_beside_none_is_the_output() -> None:
    module = Attention()
    payload = saved(module, torch.rand(4, 3), dynamic_shapes=({0: BATCH},))
    signature = exported.read_signature(payload, "file")
    assert [each.name for each in signature.outputs] == ["output"]
    model = predictor("torch_export", signature).load(WeightSnapshot.from_payload(1, payload))
    expected = module(torch.from_numpy(X))[0].detach().numpy()
    np.testing.assert_allclose(model.predict_batch([{"x": X}])[0]["output"], expected, rtol=1e-5, atol=1e-6)


def test_an_onnx_file_says_what_it_takes_and_answers() -> None:
    signature = onnx_format.read_signature(onnx_payload(), "file")
    assert [(each.name, each.datatype, each.shape) for each in (*signature.inputs, *signature.outputs)] == [
        ("x", "FP32", [-1, 3]),
        ("y", "FP32", [-1, 3]),
    ]
    subject = predictor("onnx", signature)
    two, three = (subject.load(WeightSnapshot.from_payload(n, onnx_payload(float(n)))) for n in (2, 3))
    answers = two.predict_batch([{"x": X[:1]}, {"x": X[1:]}])
    np.testing.assert_array_equal(np.concatenate([each["y"] for each in answers]), X * 2)
    np.testing.assert_array_equal(three.predict_batch([{"x": X}])[0]["y"], X * 3)


def test_strings_go_through_an_onnx_file_as_text() -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "same",
        [helper.make_tensor_value_info("x", TensorProto.STRING, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, ["batch", 2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    payload = bytes(model.SerializeToString())
    loaded = predictor("onnx", onnx_format.read_signature(payload, "file")).load(
        WeightSnapshot.from_payload(1, payload)
    )
    words = [[b"plain", "é".encode()]]
    assert loaded.predict_batch([{"x": np.array(words, object)}])[0]["y"].tolist() == words
    with refused(422, "input 'x': expected text in UTF-8"):
        loaded.predict_batch([{"x": np.array([[b"plain", b"\xff"]], object)}])


def test_a_list_of_maps_is_refused_with_the_option_that_leaves_it_out() -> None:
    floats = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, floats))
    graph = helper.make_graph(
        [helper.make_node("ZipMap", ["scores"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])],
        "classifier",
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_value_info("maps", maps)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    payload = bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
    with pytest.raises(ConfigError, match=r"'maps' is a seq\(map.*options=\{id\(model\): \{'zipmap': False\}\}"):
        onnx_format.read_signature(payload, "file")


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("torch_export", b"nonsense"),
        ("onnx", b"nonsense"),
        ("torchscript", b"nonsense"),
        ("torchscript", scripted_payload(TwoInputs())[:300]),
    ],
)
def test_a_file_that_is_none_of_its_format_is_refused(
    kind: str, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(WeightsError, match=r"version 3 is not an? "):
        predictor(kind, SIGNATURE).load(WeightSnapshot.from_payload(3, payload))
    assert not caplog.records  # what torch says of it is in the error


def test_a_fixed_batch_is_refused_unless_it_is_served_without_one(shoal_home: Path, tmp_path: Path) -> None:
    for kind, payload in (
        ("torch_export", exported_payload(TwoInputs(), dynamic=False)),
        ("onnx", onnx_payload(batch=4)),
    ):
        reader = exported if kind == "torch_export" else onnx_format
        signature = reader.read_signature(payload, "file")  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"max_batch_size = 8: '\w+' is FP32 \[4, 3\], and dimension 0 of it"):
            predictor(kind, signature)  # type: ignore[arg-type]
        model = predictor(kind, signature, max_batch_size=0).load(WeightSnapshot.from_payload(1, payload))  # type: ignore[arg-type]
        assert len(model.predict_batch([{each.name: np.ones((1, 4, 3), np.float32) for each in signature.inputs}])) == 1
    fixed = tmp_path / "fixed.onnx"
    fixed.write_bytes(onnx_payload(batch=4))
    told = said(f"models add {fixed}")
    assert "Dimension 0 of x, y is not dynamic. To batch requests, export it with a dynamic first" in told
    assert "shoal serve deploy fixed@champion endpoint.model.max_batch_size=0" in told


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("onnx", {"compile": True}, "compile = True: is not for models of format onnx"),
        ("onnx", {"precision": "bf16"}, "precision = 'bf16': is not for models of format onnx"),
        ("torchscript", {"compile": True}, "compile = True: is not for models of format torchscript"),
        ("torch_export", {"precision": "int8"}, "precision = 'int8': is not for models of format torch_export"),
    ],
)
def test_an_option_that_a_format_lacks_is_refused(kind: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        predictor(kind, SIGNATURE, **options)


def test_a_program_goes_through_the_registry_and_follows_its_alias(shoal_home: Path) -> None:
    registry = Registry()
    signature = onnx_format.read_signature(onnx_payload(), "file")
    for version in (1, 2):
        snapshot = WeightSnapshot.from_payload(1, onnx_payload(float(version)))
        registry.register("scaled", snapshot, model=ModelFactory(format="onnx"), signature=signature)
    found = registry.get("scaled@champion")
    assert sorted(path.name for path in Path(found.location).iterdir()) == ["claim.json", "manifest.json", "model.onnx"]
    subject = predictor(found.manifest.model.format, found.manifest.signature)
    assert subject.load(found.snapshot()).predict_batch([{"x": X[:1]}])[0]["y"].tolist() == (X[:1] * 2).tolist()
    found.weight_file().path.write_bytes(b"damaged")
    with pytest.raises(WeightsError, match=r"model\.onnx of scaled@2 is damaged"):
        registry.get("scaled@2").snapshot()


def test_a_file_is_added_from_the_command_line_and_shown(shoal_home: Path, tmp_path: Path) -> None:
    program = tmp_path / "Scaled.onnx"
    program.write_bytes(onnx_payload())
    told = said(f"models add {program}")
    assert "scaled@champion is scaled@1 now" in told
    assert "It takes x: FP32 [any, 3]\nIt gives y: FP32 [any, 3]\n" in told
    assert "shoal serve deploy scaled@champion" in told
    exported_file = tmp_path / "model.pt2"
    exported_file.write_bytes(exported_payload(TwoInputs()))
    told = said(f"models add {exported_file} --name pair --alias candidate")
    assert "pair@candidate is pair@1 now" in told
    shown = " ".join(said("models show pair").split())
    for text in ("built by model.pt2 alone", "input left: FP32 [any, 3]", "output output_1: INT64 [any]", "KiB, whole"):
        assert text in shown, shown


def test_a_file_of_another_kind_is_refused(shoal_home: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "model.pkl"
    wrong.write_bytes(b"")
    assert "model.pkl': is not one of .pt2, .onnx, .pt" in complaint(f"models add {wrong}")
    program = tmp_path / "model.onnx"
    program.write_bytes(b"nonsense")
    assert "model.onnx is not an ONNX model" in complaint(f"models add {program}")
    assert "nowhere.onnx': cannot be read" in complaint(f"models add {tmp_path}/nowhere.onnx")
    assert Registry().list() == ()


def test_a_torchscript_file_is_added_with_its_signature(shoal_home: Path, tmp_path: Path) -> None:
    program, tensors = tmp_path / "pair.pt", tmp_path / "tensors.yaml"
    program.write_bytes(scripted_payload(TwoInputs()))
    tensors.write_text(TENSORS)
    refused = complaint(f"models add {program}")
    assert refused.startswith("signature = '': ")
    assert "pair.pt has no names" in refused
    told = said(f"models add {program} --signature {tensors}")
    assert "pair@champion is pair@1 now" in told
    assert "It gives output_0: FP32 [any, 2]; output_1: INT64 [any]" in told
    version = Registry().get("pair")
    assert version.weight_file().path.name == "model.pt"
    loaded = predictor("torchscript", version.manifest.signature).load(version.snapshot())
    assert loaded.predict_batch([{"left": X[:1], "right": X[:1]}])[0]["output_1"].shape == (1,)
    state, onnx_file = tmp_path / "state.pt", tmp_path / "pair.onnx"
    torch.save(TwoInputs().state_dict(), state)
    assert "state.pt is not a TorchScript file" in complaint(f"models add {state} --signature {tensors}")
    onnx_file.write_bytes(b"")
    assert "which has its own. leave it out" in complaint(f"models add {onnx_file} --signature {tensors}")
