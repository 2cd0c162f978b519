"""The endpoint's OpenAPI document, a committed file, and docs/inference-protocol.md: true of what is served, and
complete."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, CheckFunction, load_all_checks

from registered import tensors
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import TOKEN, served
from shoal.open_inference import episodes, messages
from shoal.open_inference.datatypes import DATATYPES
from shoal.serve.controller.change_request import ChangeRequest
from shoal.serve.http.admin import openapi_document
from shoal.serve.http.routes import (
    ADMIN_ACTIONS,
    UNAUTHENTICATED_ACTIONS,
    RouteAction,
    RouteTarget,
    match_route,
)
from shoal.serve.messages.infer_call import Arrays

DOCUMENT: dict[str, Any] = json.loads(openapi_document())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
MESSAGES = (messages.ServerMetadata, messages.ModelMetadata, messages.InferResponse, messages.Statistics)
MESSAGES += (episodes.EpisodeRequest, episodes.EpisodeAnswer)
MESSAGES += (messages.IndexedModel, messages.IndexRequest, messages.RepositoryRequest, messages.Error)
# Who may answer so, besides what every path may: the statuses of requests as such, of keys and of bodies.
OWN_STATUSES = {
    RouteAction.READY: {503},
    RouteAction.MODEL: {404},
    RouteAction.MODEL_READY: {404, 503},
    RouteAction.MODEL_CONFIG: {404},
    RouteAction.INFER: {404, 422, 500, 503, 504},
    RouteAction.ROWS: {404, 422, 500, 503, 504},
    RouteAction.STATISTICS: {404},
    RouteAction.MODEL_STATISTICS: {404},
    RouteAction.LOAD: {404, 409, 503},
    RouteAction.UNLOAD: {404, 409, 503},
    RouteAction.STATUS: {503},
    RouteAction.ROLLOUT: {404, 409, 503},
    RouteAction.EPISODES: {404, 409, 410, 422, 500, 503, 504},
    RouteAction.METRICS: {404},
}


def target_of(template: str) -> RouteTarget:
    target = match_route(template.format(model="m", version="7"))
    assert target is not None, template
    return target


TEMPLATES = {template: target_of(template).action for template in DOCUMENT["paths"]}
KEY = {"Authorization": f"Bearer {TOKEN}"}
OPERATIONS = {
    f"{method.upper()} {template}": (template, method)
    for template, item in DOCUMENT["paths"].items()
    for method in item
}
load_all_checks()


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    """The document of an endpoint with two models, as it is served; its cases call that endpoint."""
    host = FakeHost(FakeModel("m"), FakeModel("n", tensors(t=("BYTES", [-1]))), shelf=(FakeModel("shelved"),))
    with served(host) as (address, _):
        loaded = schemathesis.openapi.from_url(f"{address}/openapi.json", headers=KEY)
        loaded.config.update(base_url=address)
        yield loaded


def test_the_document_is_valid(schema: Any) -> None:
    schema.validate()


def test_every_path_is_described() -> None:
    assert set(TEMPLATES.values()) == set(RouteAction) - {RouteAction.PEER_INFER}  # of replicas, for each other
    for template in TEMPLATES:
        assert [target_of(template).method.lower()] == list(DOCUMENT["paths"][template])
    num_of_models = sum(each.value[1].startswith("/v2/models/{") for each in RouteAction)  # with a version, too
    assert len(TEMPLATES) == len(RouteAction) - 1 + num_of_models


def test_the_schemas_of_messages_are_those_of_the_types_that_are_sent() -> None:
    """To mend the file: write what this compares it with into `components.schemas`."""
    _, made = msgspec.json.schema_components(MESSAGES, ref_template="#/components/schemas/{name}")
    made = json.loads(msgspec.json.encode(made))
    assert {name: SCHEMAS.get(name) for name in made} == made


def test_the_schemas_that_are_in_words_name_what_is_read() -> None:
    assert SCHEMAS["InputTensor"]["properties"]["datatype"] == {"enum": list(DATATYPES)}
    fields = {each.encode_name for each in msgspec.structs.fields(ChangeRequest)}
    assert SCHEMAS["Change"]["properties"].keys() == fields
    actions = get_args(get_type_hints(ChangeRequest)["action"])
    assert set(SCHEMAS["Change"]["properties"]["action"]["enum"]) == set(actions)


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_path_lists_the_statuses_that_it_may_have(template: str) -> None:
    action = TEMPLATES[template]
    (operation,) = DOCUMENT["paths"][template].values()
    expected = {200, 414, 431} | OWN_STATUSES.get(action, set())
    expected |= set() if action in UNAUTHENTICATED_ACTIONS else {401, 403, 429}
    expected |= {400, 408, 413, 415} if action.value[0] == "POST" else set()
    expected |= {503} if action in ADMIN_ACTIONS else set()
    assert [int(status) for status in operation["responses"]] == sorted(expected)
    assert (operation.get("security") == []) == (action in UNAUTHENTICATED_ACTIONS)
    assert ("requestBody" in operation) == (action.value[0] == "POST")
    in_path = {name for name in ("model", "version") if f"{{{name}}}" in template}
    named = {each["$ref"].rpartition("/")[2] for each in operation["parameters"]}
    assert in_path == named & {"model", "version"}


def test_nothing_in_it_is_unused_and_every_reference_is_there() -> None:
    text = openapi_document().decode()
    kinds = ("parameters", "headers", "responses", "schemas")
    components = {f"#/components/{kind}/{name}" for kind in kinds for name in DOCUMENT["components"][kind]}
    assert set(re.findall(r'"\$ref": "([^"]+)"', text)) == components


def checks(template: str) -> list[CheckFunction]:
    # Whether a tensor fits depends on the model; the document is of any.
    excluded = (
        {"positive_data_acceptance"} if template.endswith(("/infer", "/rows", "/rollout", "/episodes")) else set()
    )
    return [CHECKS.get_one(name) for name in CHECKS.get_all_names() if name not in excluded]


CASES = [
    pytest.param(operation, mode, id=f"{mode.value} {operation}")
    for operation, (template, _) in OPERATIONS.items()
    for mode in schemathesis.GenerationMode
    if mode is schemathesis.GenerationMode.POSITIVE
    or TEMPLATES[template] not in UNAUTHENTICATED_ACTIONS  # nothing could be wrong there
]


@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_what_is_served_is_what_is_written(schema: Any, operation: str, mode: schemathesis.GenerationMode) -> None:
    template, method = OPERATIONS[operation]
    session = requests.Session()

    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    @given(schema[template][method].as_strategy(generation_mode=mode), st.booleans())
    def holds(case: Any, existing: bool) -> None:
        if existing and mode is schemathesis.GenerationMode.POSITIVE and case.path_parameters:
            case.path_parameters |= {"model": "m"} | ({"version": "7"} if "version" in case.path_parameters else {})
        case.call_and_validate(session=session, headers=KEY, checks=checks(template))

    with session:
        holds()


# -- docs/inference-protocol.md: its examples run, its tables are complete


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
