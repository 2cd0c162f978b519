"""The endpoint's OpenAPI document, a committed file: valid, of every path there is, and true of what is served."""

import json
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
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
