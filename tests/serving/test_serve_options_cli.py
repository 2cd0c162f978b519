"""`shoal serve set` and `shoal serve deploy --into`: the options of a running endpoint's models that they send."""

from __future__ import annotations

from typing import Any

import pytest

from serving.test_serve_cli import Host, complaint, host, lines, recorded, url

__all__ = ["host", "recorded", "url"]  # fixtures


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["deadline_s=0.1"], {"options": {"deadline_s": 0.1}}),
        (
            ["guard.min_requests=9", "guard.metric=accuracy", "precision=bf16", "--reason", "fast", "--timeout-s", "9"],
            {
                "options": {"guard": {"min_requests": 9, "metric": "accuracy"}, "precision": "bf16"},
                "reason": "fast",
                "timeout_s": 9.0,
            },
        ),
    ],
)
def test_options_are_sent_as_they_were_set(recorded: str, host: Host, words: list[str], change: dict[str, Any]) -> None:
    assert lines("serve", "set", "fashion", *words) == ["fashion: 90% by 3 (stable), 10% by 4 (candidate)"]
    assert host.changes[-1] == {"model": "fashion", "action": "set", "timeout_s": 120.0, **change}


def test_models_are_added_with_options_of_all_and_of_one(
    recorded: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = host.get_model("fashion")
    monkeypatch.setattr(host, "get_model", lambda name: there)
    words = ["endpoint.model.deadline_s=0.1", "endpoint.models.fashion.precision=bf16"]
    lines("serve", "deploy", "fashion@3", "text", "--into", "shop", *words)
    assert host.changes[-2:] == [
        {
            "model": "fashion@3", "action": "deploy", "timeout_s": 120.0,
            "options": {"deadline_s": 0.1, "precision": "bf16"},
        },
        {"model": "text", "action": "deploy", "timeout_s": 120.0, "options": {"deadline_s": 0.1}},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["set", "fashion", "deadlin_s=1"], "deadlin_s = 1: no such field"),
        (["set", "fashion", "deadline_s"], "is not of the form a.b=c"),
        (["set", "fashion@3", "deadline_s=1"], "names a version, where the whole model is meant"),
        (["deploy", "--into", "shop", "endpoint.model.deadline_s=1"], "into = 'shop': needs a model"),
        (["deploy", "m", "--into", "shop", "endpoint.num_replicas=3"], "'endpoint.num_replicas': is a field of an"),
        (["deploy", "m", "--into", "shop", "endpoint.models.n.finite=off"], "'endpoint.models.n': is not among the"),
        (["deploy", "m", "--into", "shop", "models=n"], "'models': is a field of an endpoint that is deployed anew"),
    ],
)
def test_fields_that_a_running_endpoint_does_not_take_are_refused(
    recorded: str, words: list[str], message: str
) -> None:
    assert message in complaint("serve", *words)
