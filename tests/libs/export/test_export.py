"""`shoal export`: what a folder answers, compared with an endpoint; what it runs; and what cannot be exported."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from libs.export.exported import (
    IDS,
    INFER,
    TRANSPOSED,
    Bessel,
    BranchesOnSize,
    ByName,
    Narrow,
    Pair,
    Scripted,
    SmallIds,
    Transposed,
    export_pair,
    register,
    register_file,
    request,
    write,
)
from serving import table_model
from serving.asgi import Client
from serving.replica_set import ReplicaSet
from shoal.errors import ConfigError, ShoalError
from shoal.libs.export import export_model as export_module
from shoal.libs.export import folder as export_folder
from shoal.libs.export.command import export
from shoal.libs.export.formats.exported import read_signature
from shoal.libs.export.runtime.model import FolderModel
from shoal.registry import Signature, TensorSignature
from shoal.serve.spec.model_source import model_from_ref

# -- formats ----------------------------------------------------------------------------------------------------------


def script(module: nn.Module) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(module), file)  # type: ignore[no-untyped-call]
    return file.getvalue()


def trace_program(module: nn.Module) -> bytes:
    rows = torch.export.Dim("rows")
    length = torch.export.Dim("length")
    file = io.BytesIO()
    example = torch.rand(2, 5, 3), torch.rand(2, 3)
    torch.export.save(torch.export.export(module, example, dynamic_shapes=({0: rows, 1: length}, {0: rows})), file)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["module", "by name", "torchscript", "torch_export"])
def test_a_folder_answers_as_the_registered_model(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = (ByName if kind == "by name" else Pair)().eval()
    match kind:
        case "torchscript":
            scripted = Scripted()
            scripted.load_state_dict(module.state_dict())
            register_file(script(scripted.eval()), kind)
        case "torch_export":
            payload = trace_program(module)
            register_file(payload, kind, signature=read_signature(payload, "file"))
        case _:
            register(module)
    report = write(tmp_path / "out")
    assert (report.model, report.num_examples) == ("pair@1", 3)
    assert report.difference < 1e-6
    asked = request(4, 9)
    response = FolderModel(tmp_path / "out").answer("POST", "/v2/models/pair/infer", [], msgspec.json.encode(asked))
    tensors = {each["name"]: each for each in json.loads(response.body)["outputs"]}
    left, right = (torch.tensor(each["data"]) for each in asked["inputs"])
    expected = {name: value.detach().numpy() for name, value in module(left, right).items()}
    np.testing.assert_allclose(tensors["y"]["data"], expected["y"].ravel(), rtol=1e-5)
    assert tensors["label"]["data"] == expected["label"].ravel().tolist()


# -- an endpoint of the same ONNX file --------------------------------------------------------------------------------

ROW = {"left": [[0.5, 1, 2], [3, 4, 5]], "right": [0.25, 1, 2]}
FP32 = {"name": "right", "shape": [1, 3], "datatype": "FP32"}
HEAD = json.dumps({"inputs": [{**FP32, "parameters": {"binary_data_size": 12}}]}).encode()
REQUESTS: list[tuple[str, str, bytes, dict[str, str]]] = [
    *[("POST", INFER, json.dumps(request(rows, length, rows)).encode(), {}) for rows, length in ((1, 1), (3, 8))],
    ("POST", "/v2/models/pair/versions/1/infer", json.dumps(request(2, 2)).encode(), {}),
    *[("POST", "/v2/models/pair/rows", json.dumps(rows).encode(), {}) for rows in (ROW, [ROW, ROW], {"left": [[0]]})],
    ("POST", INFER, json.dumps({**request(1, 2), "parameters": {"binary_data_output": True}}).encode(), {}),
    ("POST", INFER, json.dumps({**request(1, 2), "outputs": [{"name": "label"}]}).encode(), {}),
    ("POST", INFER, HEAD + bytes(12), {"inference-header-content-length": str(len(HEAD))}),
    ("POST", INFER, b"{", {}),
    ("POST", INFER, b"{}", {}),
    ("POST", INFER, b"x", {"inference-header-content-length": "x"}),
    ("POST", INFER, b"x", {"content-encoding": "br"}),
    ("POST", INFER, json.dumps({"inputs": [{**FP32, "data": [1, 2]}]}).encode(), {}),
    ("POST", INFER, json.dumps({"inputs": [{**FP32, "datatype": "INT8", "data": [1, 2, 3]}]}).encode(), {}),
    ("POST", INFER, json.dumps({"inputs": [{**FP32, "shape": [65, 3], "data": []}]}).encode(), {}),
    ("POST", INFER, json.dumps({**request(1, 2), "outputs": [{"name": "z"}]}).encode(), {}),
    ("POST", "/v2/models/pair/versions/7/infer", b"{}", {}),
    ("POST", "/v2/models/other/infer", b"{}", {}),
    ("GET", INFER, b"", {}),
    *[("GET", path, b"", {}) for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/pair", "/v2/nothing")],
    *[("GET", path, b"", {}) for path in ("/v2/models/pair/ready", "/v2/models/pair/versions/1", "/" + "x" * 2000)],
]


@pytest.fixture(scope="module")
def onnx_payload(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return (export_pair(tmp_path_factory.mktemp("onnx")) / "model.onnx").read_bytes()


async def test_a_folder_answers_as_an_endpoint_bit_for_bit(onnx_payload: bytes, tmp_path: Path) -> None:
    register_file(onnx_payload, "onnx")
    assert write(tmp_path / "out").difference == 0
    model = FolderModel(tmp_path / "out")

    async with ReplicaSet(model_from_ref("pair")) as endpoint:
        (replica,) = await endpoint.start()
        for method, path, body, headers in REQUESTS:
            expected = await Client(replica._rest).call(method, path, [body], headers)
            pairs = [(name.encode(), text.encode()) for name, text in headers.items()]
            found = model.answer(method, path, pairs, body)
            assert (found.status, b"".join([found.body, *found.parts])) == (expected.status, expected.content)
            extra = {name.decode(): text.decode() for name, text in found.headers}
            assert extra | {"content-type": found.content_type.decode()} == {
                name: text for name, text in expected.headers.items() if name != "content-length"
            }


@pytest.mark.parametrize(
    ("options", "columns", "status"),
    [
        ({"batch_dim": {"state": 1, "rate": None, "y": 1}, "max_batch_size": 4}, 4, 200),
        ({"batch_dim": {"state": 1, "rate": None, "y": 1}, "max_batch_size": 4}, 5, 422),
        ({"max_batch_size": 0}, 5, 200),
    ],
)
def test_the_batch_is_where_the_options_say(options: dict[str, Any], columns: int, status: int, tmp_path: Path) -> None:
    register(Transposed(), "pair", TRANSPOSED)
    reject(tmp_path, "max_batch_size")
    assert write(tmp_path / "out", **options).difference < 1e-6
    shapes = {"rate": [1], "state": [3, columns]}  # in another order than the model's
    tensors = [{"name": name, "shape": shape, "datatype": "FP32"} for name, shape in shapes.items()]
    tensors = [{**each, "data": [2.0] * int(np.prod(each["shape"]))} for each in tensors]
    response = FolderModel(tmp_path / "out").answer("POST", INFER, [], msgspec.json.encode({"inputs": tensors}))
    assert response.status == status
    if status == 200:
        (y,) = json.loads(response.body)["outputs"]
        assert (y["shape"], y["data"]) == ([3, columns], [4.0] * columns + [8.0] * columns + [12.0] * columns)


def test_a_model_that_fails_is_concealed(onnx_payload: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    register_file(onnx_payload, "onnx")
    write(tmp_path / "out")
    model = FolderModel(tmp_path / "out")
    model._forward = lambda inputs: 1 / 0  # type: ignore[assignment, return-value]
    response = model.answer("POST", INFER, [], json.dumps(request(1, 1)).encode())
    error = json.loads(response.body)["error"]
    assert response.status == 500
    assert error.startswith("the model failed on this request")
    assert "ZeroDivisionError" in caplog.text


# -- what is not exported ---------------------------------------------------------------------------------------------


def identity(**kwargs: Any) -> Callable[..., Any]:
    return lambda arrays: arrays


def reject(tmp_path: Path, field: str, **fields: Any) -> ConfigError:
    """The error; nothing is left behind."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        write(fields.pop("into", tmp_path / "out"), **fields)
    assert caught.value.field == field
    assert sorted(tmp_path.rglob("*")) == before
    return caught.value


def test_a_model_that_onnx_cannot_express_is_rejected_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(Bessel())
    assert "special_i1" in str(reject(tmp_path, "model"))
    assert capsys.readouterr().out == ""  # torch prints the graph


def test_a_graph_that_onnxruntime_cannot_compute_is_rejected_with_its_parent(tmp_path: Path) -> None:
    register(Narrow(), lineage={"parent": "pair@7"})
    error = reject(tmp_path, "model")
    assert "onnxruntime cannot compute its graph" in error.problem
    assert error.remedy == "export pair@7, from which it was made"


def test_a_model_whose_answers_differ_is_rejected(tmp_path: Path) -> None:
    module = BranchesOnSize()
    with torch.no_grad():
        module.linear.weight[1] = module.linear.weight[0]  # the label is that of the larger bias, in both
    register(module)
    assert "a generated example of 1 rows differs by" in str(reject(tmp_path, "tolerance"))
    assert write(tmp_path / "out", tolerance=100).difference > 0.01


def test_a_model_with_hooks_is_rejected_by_name(tmp_path: Path) -> None:
    register(Pair(), preprocess=f"{__name__}:identity")
    assert "has the preprocess" in str(reject(tmp_path, "model"))
    reject(tmp_path, "preprocess", preprocess="other:hook")
    assert write(tmp_path / "out", preprocess="").model == "pair@1"


def test_a_policy_that_samples_is_rejected_unless_its_best_actions_are_wanted(tmp_path: Path) -> None:
    register(Pair(), action="sampled")
    assert "samples its actions" in str(reject(tmp_path, "model"))
    assert write(tmp_path / "out", action="best").model == "pair@1"


def test_an_example_of_the_user_is_compared_and_stored(tmp_path: Path) -> None:
    register(SmallIds(), signature=IDS)
    assert "--example FILE" in str(reject(tmp_path, "model"))
    body = {"inputs": [{"name": "ids", "shape": [2, 4], "datatype": "INT64", "data": [0] * 8}]}
    for number, content in enumerate((b"{", b"{}", json.dumps(body).replace("0", "9").encode())):
        file = tmp_path / f"{number}.json"
        file.write_bytes(content)
        assert str(file) in str(reject(tmp_path, "examples", examples=[str(file)]))
    file.write_text(json.dumps(body))
    assert write(tmp_path / "out", examples=[str(file)]).num_examples == 1
    assert json.loads((tmp_path / "out" / "request.json").read_bytes()) == body


@pytest.mark.parametrize(
    ("signature", "error"),
    [
        (Signature(inputs=IDS.inputs, outputs=[TensorSignature(name="ids", datatype="FP32", shape=[-1, 4, 2])]), "ids"),
        (Signature(inputs=[TensorSignature(name="ids", datatype="BYTES", shape=[-1])], outputs=IDS.outputs), "BYTES"),
        (Signature(inputs=[TensorSignature(name="ids", datatype="BF16", shape=[-1])], outputs=IDS.outputs), "BF16"),
    ],
)
def test_tensors_that_onnx_lacks_are_rejected(signature: Signature, error: str, tmp_path: Path) -> None:
    register(SmallIds(), signature=signature)
    assert error in str(reject(tmp_path, "model"))


def test_a_folder_is_replaced_by_an_export_of_the_same_model_alone(onnx_payload: bytes, tmp_path: Path) -> None:
    for name in ("pair", "other"):
        register_file(onnx_payload, "onnx", name)
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")  # into an empty folder
    for into, fields in (("file", {}), ("full", {"replace": True}), ("out", {}), ("out", {"replace": True})):
        reject(tmp_path, "into", into=tmp_path / into, model="other" if fields else "pair", **fields)
    (tmp_path / "out" / "of an older one").write_text("")
    write(tmp_path / "out", "lambda", replace=True)
    assert (tmp_path / "out" / "lambda_function.py").exists()
    assert not (tmp_path / "out" / "of an older one").exists()
    assert {each.name for each in tmp_path.iterdir() if each.name.startswith(".")} == set()


def test_an_interrupted_export_leaves_the_former_folder(
    onnx_payload: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    register_file(onnx_payload, "onnx")
    write(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(export_module, "copy_runtime", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", "lambda", replace=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_beyond_the_limit_of_lambda_is_rejected(
    onnx_payload: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_file(onnx_payload, "onnx")
    monkeypatch.setattr(export_folder, "MAX_LAMBDA_BYTES", 1 << 20)
    assert "Lambda takes 1" in str(reject(tmp_path, "to", to="lambda"))
    write(tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--to", "nowhere"], "to = 'nowhere'"),
        (["--to", "lambda", "tolerance=-1"], "tolerance = -1"),
        (["--to", "lambda", "tolerance=.inf"], "tolerance = inf"),
        (["--to", "lambda", "max_batch_size=many"], "max_batch_size = 'many'"),
        (["--to", "lambda", "batch_dim={nothing: 1}"], "batch_dim"),
        (["--to", "lambda", "no_field=1"], "no_field"),
        (["--to", "lambda", "--example", "absent.json"], "examples = 'absent.json'"),
        (["--to", "lambda"], "there is no model 'absent'"),
    ],
)
def test_bad_words_are_rejected_by_field(onnx_payload: bytes, words: list[str], error: str) -> None:
    register_file(onnx_payload, "onnx")
    outcome = CliRunner().invoke(export, ["absent" if "model" in error else "pair", *words])
    assert isinstance(outcome.exception, ShoalError)
    assert error in str(outcome.exception)


def test_the_verb_says_what_it_wrote(onnx_payload: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_file(onnx_payload, "onnx")
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(export, ["pair@1", "--to", "container"], catch_exceptions=False)
    assert outcome.output.startswith("pair@1 is in pair-container: ")
    assert (tmp_path / "pair-container" / "server.py").exists()


def test_an_export_loads_torch_for_a_conversion_alone() -> None:
    program = (
        "import sys, shoal.libs.export.command; print({'torch', 'ray', 'uvicorn', 'shoal.runs'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_model_of_raw_rows_is_refused_with_what_serves_it(tmp_path: Path) -> None:
    table_model.register("basic")
    text = str(reject(tmp_path, "model", model="charges"))
    assert "takes rows of a table (age, ...)" in text
    assert 'shoal.load("charges@1").predict(rows) answers in a program' in text
