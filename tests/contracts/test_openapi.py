"""The endpoint's OpenAPI document: valid, of every path there is, and true of what is served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, CheckFunction, load_all_checks

from serving.fake_host import FakeHost, FakeModel, tensors
from serving.served_here import TOKEN, served
from shoal.serve.http.openapi import TEMPLATES, document
from shoal.serve.http.routes import (
    FIXED_ROUTES,
    MODEL_ROUTES,
    REPOSITORY_ROUTES,
    UNAUTHENTICATED_ACTIONS,
    RouteAction,
    match_route,
)

KEY = {"Authorization": f"Bearer {TOKEN}"}
OPERATIONS = {
    f"{method.upper()} {template}": (template, method)
    for template, item in document()["paths"].items()
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
    assert set(TEMPLATES.values()) == set(RouteAction)
    for template, action in TEMPLATES.items():
        target = match_route(template.format(model="m", version="7"))
        assert target is not None
        assert (target.action, [target.method.lower()]) == (action, list(document()["paths"][template]))
    num_of_models = 2 * len(MODEL_ROUTES)  # with a version and without
    assert len(TEMPLATES) == len(FIXED_ROUTES) + num_of_models + len(REPOSITORY_ROUTES)


def checks(template: str) -> list[CheckFunction]:
    # Whether a tensor fits depends on the model; the document is of any.
    excluded = {"positive_data_acceptance"} if template.endswith(("/infer", "/rollout")) else set()
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
