"""docs/inference-protocol.md and the endpoint say the same: its examples run, its tables are complete."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest

from registered import tensors
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import TOKEN, served
from shoal.open_inference.datatypes import DATATYPES
from shoal.serve.controller.change_request import ChangeRequest
from shoal.serve.http.admin import openapi_document
from shoal.serve.http.routes import ADMIN_ACTIONS, match_route
from shoal.serve.messages.infer_call import Arrays

DOCUMENT = json.loads(openapi_document())
PAGE = (Path(__file__).parents[2] / "docs" / "inference-protocol.md").read_text()
EXAMPLES = re.findall(r"^```sh\n(.*?)^```$(?:\n\n^```json\n(.*?)^```$)?", PAGE, re.DOTALL | re.MULTILINE)
WEIGHTS = np.array([[1, 1, 1, 1], [1, 1, -1, 1], [1, 0, -1, -1]], dtype=np.float32)


def scored(inputs: Arrays) -> dict[str, np.ndarray]:
    label = np.array([[b"setosa"]] * len(inputs["x"]), dtype=object)
    return {"scores": inputs["x"] @ WEIGHTS.T, "label": label}


class Iris(FakeModel):
    """Version 3 answers, though there is a version 4."""

    version = 3  # type: ignore[assignment]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    outputs = tensors(scores=[-1, 3], label=("BYTES", [-1, 1]))
    iris = Iris("iris", tensors(x=[-1, 4]), outputs, scored, versions=(3, 4))
    with served(FakeHost(iris, shelf=(FakeModel("digits"),))) as (address, _):
        yield address


@pytest.mark.parametrize(("command", "answer"), EXAMPLES)
def test_the_examples_run(address: str, command: str, answer: str) -> None:
    environment = {**os.environ, "URL": address, "KEY": TOKEN}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    said, _ = json.JSONDecoder().raw_decode(done.stdout.decode("latin-1"))  # bytes of tensors may follow
    if answer:
        assert said == json.loads(answer)
    else:
        assert "error" not in said


def rows(header: str) -> list[list[str]]:
    """The cells of the table whose first cell is `header`."""
    table = PAGE.partition(f"| {header} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def names(header: str) -> list[str]:
    return [name for cells in rows(header) for name in re.findall(r"`([^`]+)`", cells[0])]


def test_every_path_is_on_the_page() -> None:
    described = {f"{method.upper()} {path}" for path, item in DOCUMENT["paths"].items() for method in item}
    assert set(names("path")) == described
    for cell, _ in rows("path"):
        method, path = re.findall(r"`(\w+) ([^`]+)`", cell)[0]
        target = match_route(path.format(model="m", version="1"))
        assert target is not None
        assert (target.method, target.action in ADMIN_ACTIONS) == (method, cell.endswith("*"))


def test_every_status_is_on_the_page() -> None:
    operations = [operation for item in DOCUMENT["paths"].values() for operation in item.values()]
    described = {int(status) for operation in operations for status in operation["responses"]}
    assert {int(cells[0]) for cells in rows("status")} == {405, *described - {200}}


def test_every_datatype_and_header_is_on_the_page() -> None:
    assert set(names("datatype")) == set(DATATYPES)
    parameters = DOCUMENT["components"]["parameters"]
    headers = {each["name"] for each in parameters.values() if each["in"] == "header"} - {
        "inference-header-content-length"
    }
    assert headers <= set(names("header"))
    assert "Inference-Header-Content-Length" in PAGE


def test_every_change_is_on_the_page() -> None:
    assert set(names("action")) == set(get_args(get_type_hints(ChangeRequest)["action"]))
