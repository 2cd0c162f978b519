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
}


@pytest.mark.parametrize("mechanism", PLACES)
def test_a_mechanism_has_one_place(mechanism: str) -> None:
    pattern, places = PLACES[mechanism]
    found = {str(path.relative_to(PACKAGE)) for path in FILES if re.search(pattern, path.read_text())}
    assert found == places
