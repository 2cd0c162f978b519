"""The spec of an endpoint: what cannot work is refused, and the numbers that Serve gets are derived from it."""
# Some endpoints here have a port for gRPC, which shoal.libs.grpc answers.

import pickle
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.serve.spec import endpoint
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_options import GuardOptions, ModelOptions
from shoal.serve.spec.reach import Reach, require_one_address


def spec(**values: Any) -> EndpointSpec:
    return EndpointSpec.parse({"name": "linear", **values})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1", "192.0.2.1"])
def test_an_ingress_on_every_node_needs_an_address_that_every_node_has(host: str) -> None:
    fields = {"host": host, "insecure": True, "ingress": "every_node"}
    if host != "192.0.2.1":
        assert spec(**fields).ingress == "every_node"
        return
    with pytest.raises(ConfigError, match=r"192.0.2.1 is one node's: give host: 0.0.0.0 or ::") as caught:
        spec(**fields)
    assert caught.value.field == "ingress"


@pytest.mark.parametrize(
    ("origin", "is_sound"),
    [
        *((each, True) for each in ("*", "null", "https://app.example", "http://localhost:5173", "http://[::1]:8000")),
        *((each, True) for each in ("tauri://localhost", "chrome-extension://abcdef")),
        *(
            (each, False)
            for each in ("app.example", "https://app.example/", "https://App.example", "https://*.example")
        ),
        *((each, False) for each in ("https://app.example:443", "http://app.example:80", "", "https://a b")),
    ],
)
def test_an_origin_is_written_as_browsers_send_it(origin: str, is_sound: bool) -> None:
    if is_sound:
        assert spec(allow_origins=[origin], token="secret").allow_origins == [origin]
        return
    with pytest.raises(ConfigError, match="is no origin such as https:"):
        spec(allow_origins=[origin])


def test_pages_cannot_wake_an_endpoint() -> None:
    with pytest.raises(ConfigError, match=r"which the preflight of a browser has not: give scale.min = 1"):
        spec(allow_origins=["*"], scale={"min": 0, "max": 2})


def test_every_page_may_call_an_endpoint_that_wants_a_key() -> None:
    with pytest.raises(ConfigError, match="would administer the endpoint: give it a token or keys"):
        spec(allow_origins=["*"])
    assert spec(allow_origins=["*"], token="secret").allow_origins == ["*"]


TLS = {"certificate": "/c.pem", "key": "/k.pem"}


@pytest.mark.parametrize(
    ("fields", "url", "grpc"),
    [
        ({}, "http://127.0.0.1:80", "127.0.0.1:81"),
        ({"host": "::1", "route_prefix": "/a"}, "http://[::1]:80/a", "[::1]:81"),
        ({"host": "0.0.0.0", "insecure": True}, "http://127.0.0.1:80", "127.0.0.1:81"),
        ({"host": "::", "insecure": True}, "http://[::1]:80", "[::1]:81"),
        ({"host": "192.0.2.1", "tls": TLS}, "https://192.0.2.1:80", "192.0.2.1:81"),
        (
            {"host": "0.0.0.0", "tls": {**TLS, "name": "models.example"}},
            "https://models.example:80",
            "models.example:81",
        ),
    ],
)
def test_its_addresses_are_those_that_clients_here_can_reach(fields: dict[str, Any], url: str, grpc: str) -> None:
    made = spec(port=80, grpc_port=81, **fields)
    assert (made.url, made.grpc_address) == (url, grpc)


def test_one_that_joins_another_has_its_address_and_nothing_else_of_it() -> None:
    there = Reach.parse({"host": "0.0.0.0", "tls": {**TLS, "name": "models.example"}})
    joining = spec(port=80, num_replicas=3).adopt_reach(there)
    assert (joining.url, joining.num_replicas) == ("https://models.example:80", 3)
    with pytest.raises(ConfigError, match="whose address it shares") as caught:
        spec(host="127.0.0.1").adopt_reach(there)
    assert caught.value.field == "endpoint.host"


def test_applications_of_one_file_have_one_address_or_are_both_named() -> None:
    first, other = (
        {"host": "::", "tls": {**TLS, "name": "a.example"}},
        {"host": "::", "tls": {**TLS, "name": "b.example"}},
    )
    require_one_address({"a": {**first, "num_replicas": 2}, "b": other})
    require_one_address({"a": {}, "b": {"host": "127.0.0.1", "ingress_threads": 1}})
    require_one_address({"a": first, "b": {"host": "nowhere"}})  # its own application says so
    for fields, field in (
        ({**first, "tls": {**TLS, "certificate": "/other.pem"}}, "tls"),
        ({**first, "host": "0.0.0.0"}, "host"),
        ({**first, "trusted_proxies": ["10.0.0.0/8"]}, "trusted_proxies"),
        ({}, "tls"),
    ):
        with pytest.raises(ConfigError, match="of the application 'c', and 'b' has") as caught:
            require_one_address({"a": first, "b": other, "c": fields})
        assert caught.value.field == f"endpoint.{field}"


def test_whether_a_gpu_is_needed_is_said_by_any_model() -> None:
    assert not spec(num_gpus=2).needs_cuda
    assert spec(model={"device": "cuda"}).needs_cuda
    assert spec(models={"b": {"cuda_graphs": True}}).needs_cuda


def test_serve_lets_in_what_the_queue_may_hold_and_what_it_refuses() -> None:
    subject = spec(model={"max_batch_size": 8, "max_queue_size": 100}, models={"b": {"max_queue_size": 5000}})
    assert subject.max_ongoing_requests > 100 + 8 + 5000 + 64


def test_a_model_is_served_with_its_own_options_or_with_everybodys() -> None:
    subject = spec(model={"max_batch_size": 8}, models={"b": {"max_batch_size": 32}})
    assert (subject.options("a").max_batch_size, subject.options("b").max_batch_size) == (8, 32)


def test_a_model_is_served_as_all_are_but_for_what_is_said_of_it_alone() -> None:
    everybodys = {"deadline_s": 2.0, "max_batch_size": 8, "guard": {"min_requests": 5, "max_error_rate": 0.5}}
    subject = spec(model=everybodys, models={"b": {"max_queue_size": 32, "guard": {"max_error_rate": 0.1}}})
    guard = GuardOptions(min_requests=5, max_error_rate=0.1)
    expected = ModelOptions(deadline_s=2.0, max_batch_size=8, max_queue_size=32, guard=guard)
    assert subject.options("b") == subject.models["b"] == expected
    assert EndpointSpec(name="linear", model=subject.model, models=subject.models).options("b") == expected


def test_what_is_said_of_all_changes_a_model_of_which_something_else_is_said() -> None:
    subject = spec(model={"deadline_s": 2.0}, models={"b": {"max_batch_size": 16, "guard": {"metric": "accuracy"}}})
    for known in (subject, EndpointSpec.from_yaml(subject.to_yaml()), pickle.loads(pickle.dumps(subject))):
        changed = known.override(["model.deadline_s=3", "model.max_batch_size=8", "model.guard.min_requests=7"])
        guard = GuardOptions(metric="accuracy", min_requests=7)
        assert changed.options("b") == ModelOptions(deadline_s=3.0, max_batch_size=16, guard=guard)
    assert subject.override(["models.b.guard.min_value=0.9"]).options("b").guard.metric == "accuracy"


@pytest.mark.parametrize(
    ("model", "one", "field"),
    [
        ({"max_queue_size": 100}, {"max_batch_size": 200}, "models.b"),
        ({}, {"max_batch_sise": 200}, "models.b.max_batch_sise"),
        ({}, 7, "models.b"),
        (7, {"deadline_s": 1.0}, "model"),
        ({"deadline_s": 0.0}, {"deadline_s": 1.0}, "model.deadline_s"),
    ],
)
def test_what_is_said_of_one_is_refused_by_its_name(model: object, one: object, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec(model=model, models={"b": one})
    assert caught.value.field == field


def test_the_token_is_never_printed() -> None:
    subject = spec(token="hush-hush")
    assert "hush" not in f"{subject} {subject!r} {subject.to_yaml()}"


def test_workers_grpc_and_traces_need_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="give num_workers = 2"):
        spec(parallel="tensor")
    monkeypatch.setattr(endpoint, "collect_extensions", lambda group: {})
    with pytest.raises(ConfigError, match=r"num_workers = 2 .* no library .*: give num_workers = 1"):
        spec(num_workers=2)
    with pytest.raises(ConfigError, match=r"grpc_port = 0: no library speaks gRPC here: leave it out"):
        spec(grpc_port=0)
    with pytest.raises(ConfigError, match=r"^trace = 'file:x': no library records traces here"):
        spec(trace="file:x")
