"""What `shoal serve deploy` says to type first."""

import json
import subprocess
from typing import Any

import pytest

import registered
from registered import tensors
from serving import table_model
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import TOKEN, served
from shoal.cli.display.first_request import suggest_curl_command, suggest_predict_command
from shoal.home import home
from shoal.registry import ModelVersion, Signature, TensorSignature
from shoal.serve.spec.model_options import ModelOptions


def register(inputs: list[TensorSignature], name: str = "m", **example: object) -> ModelVersion:
    return registered.register(name, signature=Signature(inputs=inputs, outputs=inputs), example=example)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([("x", "FP32", [-1, 4])], "--input 0,0,0,0"),
        ([("x", "FP32", [-1])], "--input 0"),
        ([("tokens", "INT64", [-1, -1])], "--input 0,0,0"),
        ([("text", "BYTES", [-1])], "--input 'a text'"),
        ([("a", "FP32", [-1, 2]), ("b", "INT64", [-1])], "--input a=0,0 --input b=0"),
        ([("image", "FP32", [-1, 1, 28, 28])], "--image FILE"),
        ([("image", "UINT8", [-1, 32, 32, 3])], "--image FILE"),
        ([("x", "FP32", [-1, 1, 2, 2])], "--help"),
        ([("x", "FP32", [-1, 20])], "--help"),
        ([("x", "FP32", [-1, 8, 8])], "--help"),
        ([("words", "BYTES", [-1, 2])], "--help"),
    ],
)
def test_what_to_ask_first_can_be_typed_as_it_stands(inputs: list[tuple[str, str, list[int]]], words: str) -> None:
    version = register(tensors(**{name: (datatype, shape) for name, datatype, shape in inputs}))
    assert suggest_predict_command(version) == f"shoal predict m {words}"


def test_a_row_is_suggested_for_a_table() -> None:
    version = register(table_model.SIGNATURE.inputs, **table_model.ROW)
    assert suggest_predict_command(version) == f"shoal predict m '{json.dumps(table_model.ROW)}'"


NO_BATCH = {"max_batch_size": 0}
MODELS: dict[str, tuple[list[TensorSignature], dict[str, Any]]] = {
    "table": (table_model.SIGNATURE.inputs, {}),
    "named": ([TensorSignature(name="x", datatype="FP32", shape=[-1, 2], columns=["it's", "b"])], {}),
    "policy": (tensors(observation=("FP32", [-1, 4]), state=("FP32", [-1, 64]), mask=("BOOL", [-1, 2])), {}),
    "picture": (tensors(image=("UINT8", [-1, 1, 28, 28])), {}),
    "texts": (tensors(words=("BYTES", [-1, 9]), tokens=("INT64", [-1, -1])), {}),
    "alone": (tensors(x=("FP32", [2, 300]), rate=("INT64", [])), NO_BATCH),
}


def test_the_curl_line_is_answered_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    (home() / "token").write_text(TOKEN)
    models = [FakeModel(name, each, options=ModelOptions(**options)) for name, (each, options) in MODELS.items()]
    with served(FakeHost(*models)) as (url, _):
        for name, (inputs, options) in MODELS.items():
            version = register(inputs, name, **({"plan": "basic"} if name == "table" else {}))
            line = suggest_curl_command(version, ModelOptions(**options), url)
            assert len(line) < 600
            assert name == "named" or "'\"'\"'" not in line
            ended = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
            answer = json.loads(ended.stdout)
            if name == "table":
                assert (answer["plan"], answer["age"]) == ("basic", None)
            assert "error" not in answer, (line, answer)
    monkeypatch.setenv("SHOAL_TOKEN", "another")
    assert '"Authorization: Bearer $SHOAL_TOKEN" --cacert FILE https://h/v2/' in suggest_curl_command(
        version, ModelOptions(), "https://h"
    )
