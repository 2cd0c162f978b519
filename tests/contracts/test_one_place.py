"""Mechanisms of serving that have one place: a text that only these files of the package may have."""

import re

import pytest

from contracts.test_imports import FILES, PACKAGE

PLACES = {
    "the families of Prometheus, where they are counted": (
        r'"(nv_inference|shoal)_\w+_(count|total|seconds|bytes|rows)"',
        {"serve/messages/counts.py", "serve/messages/replica_report.py", "libs/language/served/text_statistics.py"},
    ),
    "whether a shadow disagreed: counted, declared, judged, and shown": (
        r"\bdisagreed\b",
        {
            *("serve/messages/counts.py", "serve/replica/model_statistics.py", "serve/replica/shadow.py"),
            *("serve/controller/canary_guard.py", "client/endpoint_status.py", "cli/display/serve_display.py"),
        },
    ),
    "an exception becomes the error of a request": (
        r"this request failed: \{type\(error\)",
        {"serve/messages/model_errors.py"},
    ),
    "a model answers an inference, which is traced and encoded": (
        r"\.record_prediction\(",
        {"serve/protocol/pipeline.py"},
    ),
    "what a model is: for REST, and for gRPC by REST's answer": (
        r"import [^)]*build_model_config",
        {"serve/http/admin.py"},
    ),
    "another replica answers a client": (r"_transport\.relay\(", {"serve/replica/cold_models.py"}),
}


@pytest.mark.parametrize("mechanism", PLACES)
def test_a_mechanism_has_one_place(mechanism: str) -> None:
    pattern, places = PLACES[mechanism]
    found = {str(path.relative_to(PACKAGE)) for path in FILES if re.search(pattern, path.read_text())}
    assert found == places
