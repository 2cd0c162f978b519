"""`shoal export`: what a folder answers, compared with an endpoint; what it runs; and what cannot be exported."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from test_export_formats import scripted_payload
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
from python_program import run_python
from registered import tensors
from serving import table_model
from serving.asgi import Client
from serving.replica_set import serving_one
from shoal.errors import ConfigError
from shoal.libs.export import folder as export_folder
from shoal.libs.export.formats.exported import read_signature
from shoal.libs.export.runtime.model import FolderModel
from shoal.registry import Signature
from typed import complaint, said

# -- formats ----------------------------------------------------------------------------------------------------------


def trace_program(module: nn.Module) -> bytes:
    rows = torch.export.Dim("rows")
    length = torch.export.Dim("length")
    file = io.BytesIO()
    example = torch.rand(2, 5, 3), torch.rand(2, 3)
    torch.export.save(torch.export.export(module, example, dynamic_shapes=({0: rows, 1: length}, {0: rows})), file)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["module", "by name", "torchscript", "torch_export"])
def test_a_folder_answers_as_the_registered_model(kind: str) -> None:
    torch.manual_seed(0)
    module = (ByName if kind == "by name" else Pair)().eval()
    match kind:
        case "torchscript":
            scripted = Scripted()
            scripted.load_state_dict(module.state_dict())
            register_file(scripted_payload(scripted.eval()), kind)
        case "torch_export":
            payload = trace_program(module)
            register_file(payload, kind, signature=read_signature(payload, "file"))
        case _:
            register(module)
    report = write()
    assert (report.model, report.num_examples) == ("pair@1", 3)
    assert report.difference < 1e-6
    asked = request(4, 9)
    response = FolderModel(Path("out")).answer("POST", "/v2/models/pair/infer", [], msgspec.json.encode(asked))
    tensors = {each["name"]: each for each in json.loads(response.body)["outputs"]}
    left, right = (torch.tensor(each["data"]) for each in asked["inputs"])
    expected = {name: value.detach().numpy() for name, value in module(left, right).items()}
    np.testing.assert_allclose(tensors["y"]["data"], expected["y"].ravel(), rtol=1e-5)
    assert tensors["label"]["data"] == expected["label"].ravel().tolist()


# -- an endpoint of the same ONNX file --------------------------------------------------------------------------------

ROW = {"left": [[0.5, 1, 2], [3, 4, 5]], "right": [0.25, 1, 2]}
FP32 = {"name": "right", "shape": [1, 3], "datatype": "FP32"}
HEAD = json.dumps({"inputs": [{**FP32, "parameters": {"binary_data_size": 12}}]}).encode()
POSTED: dict[str, list[Any]] = {
    INFER: [
        request(1, 1, 1),
        request(3, 8, 3),
        {**request(1, 2), "parameters": {"binary_data_output": True}},
        {**request(1, 2), "outputs": [{"name": "label"}]},
        {**request(1, 2), "outputs": [{"name": "z"}]},
        {},
        {"inputs": [{**FP32, "data": [1, 2]}]},
        {"inputs": [{**FP32, "datatype": "INT8", "data": [1, 2, 3]}]},
        {"inputs": [{**FP32, "shape": [65, 3], "data": []}]},
    ],
    "/v2/models/pair/versions/1/infer": [request(2, 2)],
    "/v2/models/pair/rows": [ROW, [ROW, ROW], {"left": [[0]]}],
    "/v2/models/pair/versions/7/infer": [{}],
    "/v2/models/other/infer": [{}],
}
GETS = [f"/v2/{path}" for path in ("health/live", "health/ready", "nothing", "models/pair", "models/pair/ready")]
REQUESTS: list[tuple[str, str, bytes, dict[str, str]]] = [
    *[("POST", path, json.dumps(each).encode(), {}) for path in POSTED for each in POSTED[path]],
    ("POST", INFER, HEAD + bytes(12), {"inference-header-content-length": str(len(HEAD))}),
    ("POST", INFER, b"{", {}),
    ("POST", INFER, b"x", {"inference-header-content-length": "x"}),
    ("POST", INFER, b"x", {"content-encoding": "br"}),
    *[("GET", path, b"", {}) for path in (INFER, *GETS, "/v2/models/pair/versions/1", "/" + "x" * 2000)],
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def onnx_payload(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return (export_pair(tmp_path_factory.mktemp("onnx")) / "model.onnx").read_bytes()


async def test_a_folder_answers_as_an_endpoint_bit_for_bit(onnx_payload: bytes) -> None:
    register_file(onnx_payload, "onnx")
    assert write().difference == 0
    model = FolderModel(Path("out"))

    async with serving_one("pair") as (_, replica):
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
def test_the_batch_is_where_the_options_say(options: dict[str, Any], columns: int, status: int) -> None:
    register(Transposed(), "pair", TRANSPOSED)
    reject("max_batch_size")
    assert write(**options).difference < 1e-6
    shapes = {"rate": [1], "state": [3, columns]}  # in another order than the model's
    tensors = [{"name": name, "shape": shape, "datatype": "FP32"} for name, shape in shapes.items()]
    tensors = [{**each, "data": [2.0] * int(np.prod(each["shape"]))} for each in tensors]
    response = FolderModel(Path("out")).answer("POST", INFER, [], msgspec.json.encode({"inputs": tensors}))
    assert response.status == status
    if status == 200:
        (y,) = json.loads(response.body)["outputs"]
        assert (y["shape"], y["data"]) == ([3, columns], [4.0] * columns + [8.0] * columns + [12.0] * columns)


def test_a_model_that_fails_is_concealed(onnx_payload: bytes, caplog: pytest.LogCaptureFixture) -> None:
    register_file(onnx_payload, "onnx")
    write()
    model = FolderModel(Path("out"))
    model._forward = lambda inputs: 1 / 0  # type: ignore[assignment, return-value]
    response = model.answer("POST", INFER, [], json.dumps(request(1, 1)).encode())
    error = json.loads(response.body)["error"]
    assert response.status == 500
    assert error.startswith("the model failed on this request")
    assert "ZeroDivisionError" in caplog.text


# -- what is not exported ---------------------------------------------------------------------------------------------


def identity(**kwargs: Any) -> Callable[..., Any]:
    return lambda arrays: arrays


def reject(field: str, **fields: Any) -> ConfigError:
    """The error; nothing is left behind."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(ConfigError) as caught:
        write(**fields)
    assert caught.value.field == field
    assert sorted(Path().rglob("*")) == before
    return caught.value


def test_a_model_that_onnx_cannot_express_is_rejected_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    register(Bessel())
    assert "special_i1" in str(reject("model"))
    assert capsys.readouterr().out == ""  # torch prints the graph


def test_a_graph_that_onnxruntime_cannot_compute_is_rejected_with_its_parent() -> None:
    register(Narrow(), lineage={"parent": "pair@7"})
    error = reject("model")
    assert "onnxruntime cannot compute its graph" in error.problem
    assert error.remedy == "export pair@7, from which it was made"


def test_a_model_whose_answers_differ_is_rejected() -> None:
    module = BranchesOnSize()
    with torch.no_grad():
        module.linear.weight[1] = module.linear.weight[0]  # the label is that of the larger bias, in both
    register(module)
    assert "a generated example of 1 rows differs by" in str(reject("tolerance"))
    assert write(tolerance=100).difference > 0.01


def test_a_model_with_hooks_is_rejected_by_name() -> None:
    register(Pair(), preprocess=f"{__name__}:identity")
    assert "has the preprocess" in str(reject("model"))
    reject("preprocess", preprocess="other:hook")
    assert write(preprocess="").model == "pair@1"


def test_a_policy_that_samples_is_rejected_unless_its_best_actions_are_wanted() -> None:
    register(Pair(), action="sampled")
    assert "samples its actions" in str(reject("model"))
    assert write(action="best").model == "pair@1"


def test_an_example_of_the_user_is_compared_and_stored() -> None:
    register(SmallIds(), signature=IDS)
    assert "--example FILE" in str(reject("model"))
    body = {"inputs": [{"name": "ids", "shape": [2, 4], "datatype": "INT64", "data": [0] * 8}]}
    for number, content in enumerate((b"{", b"{}", json.dumps(body).replace("0", "9").encode())):
        file = Path(f"{number}.json")
        file.write_bytes(content)
        assert str(file) in str(reject("examples", examples=[str(file)]))
    file.write_text(json.dumps(body))
    assert write(examples=[str(file)]).num_examples == 1
    assert json.loads(Path("out/request.json").read_bytes()) == body


@pytest.mark.parametrize(
    ("signature", "error"),
    [
        (Signature(inputs=IDS.inputs, outputs=tensors(ids=[-1, 4, 2])), "ids"),
        *((Signature(inputs=tensors(ids=(each, [-1])), outputs=IDS.outputs), each) for each in ("BYTES", "BF16")),
    ],
)
def test_tensors_that_onnx_lacks_are_rejected(signature: Signature, error: str) -> None:
    register(SmallIds(), signature=signature)
    assert error in str(reject("model"))


def test_a_folder_is_replaced_by_an_export_of_the_same_model_alone(onnx_payload: bytes) -> None:
    for name in ("pair", "other"):
        register_file(onnx_payload, "onnx", name)
    Path("file").write_text("")
    for name in ("full", "out"):
        Path(name).mkdir()
    Path("full/notes.txt").write_text("")
    write()  # into an empty folder
    for into, fields in (("file", {}), ("full", {"replace": True}), ("out", {}), ("out", {"replace": True})):
        reject("into", into=Path(into), model="other" if fields else "pair", **fields)
    Path("out/of an older one").write_text("")
    write(to="lambda", replace=True)
    assert Path("out/lambda_function.py").exists()
    assert not Path("out/of an older one").exists()
    assert [*Path().glob(".*")] == []


def test_an_interrupted_export_leaves_the_former_folder(onnx_payload: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    register_file(onnx_payload, "onnx")
    write()
    before = sorted(Path().rglob("*"))
    monkeypatch.setattr(export_folder, "copy_runtime", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(to="lambda", replace=True)
    assert sorted(Path().rglob("*")) == before


def test_a_folder_beyond_the_limit_of_lambda_is_rejected(onnx_payload: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    register_file(onnx_payload, "onnx")
    monkeypatch.setattr(export_folder, "MAX_LAMBDA_BYTES", 1 << 20)
    assert "Lambda takes 1" in str(reject("to", to="lambda"))
    write()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("pair --to nowhere", "to = 'nowhere'"),
        ("pair --to lambda tolerance=-1", "tolerance = -1"),
        ("pair --to lambda tolerance=.inf", "tolerance = inf"),
        ("pair --to lambda max_batch_size=many", "max_batch_size = 'many'"),
        ("pair --to lambda 'batch_dim={nothing: 1}'", "batch_dim"),
        ("pair --to lambda no_field=1", "no_field"),
        ("pair --to lambda --example absent.json", "examples = 'absent.json'"),
        ("absent --to lambda", "there is no model 'absent'"),
    ],
)
def test_bad_words_are_rejected_by_field(onnx_payload: bytes, line: str, error: str) -> None:
    register_file(onnx_payload, "onnx")
    assert error in complaint(f"export {line}")


def test_the_verb_says_what_it_wrote(onnx_payload: bytes) -> None:
    register_file(onnx_payload, "onnx")
    assert said("export pair@1 --to container").startswith("pair@1 is in pair-container: ")
    assert Path("pair-container/server.py").exists()


def test_an_export_loads_torch_for_a_conversion_alone() -> None:
    program = (
        "import sys, shoal.libs.export.command; print({'torch', 'ray', 'uvicorn', 'shoal.runs'} & sys.modules.keys())"
    )
    assert run_python(program) == "set()\n"


def test_a_model_of_raw_rows_is_refused_with_what_serves_it() -> None:
    table_model.register("basic")
    text = str(reject("model", model="charges"))
    assert "takes rows of a table (age, ...)" in text
    assert 'shoal.load("charges@1").predict(rows) answers in a program' in text
